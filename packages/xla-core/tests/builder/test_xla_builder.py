"""``xla_builder``: computations built operation by operation, or read from HLO, on ``xla`` tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_op_registry as xor
from torch_xla import _XLAC
from xla_core.compilation import program_table
from xla_core.jax_bridge import jax_private
from xla_core.testing.against_cpu import assert_same


def run(function, *tensors):
    """What a function of operations computes for these tensors: a list of results."""
    shapes = xb.tensor_shape(tensors)
    computation = xb.create_computation("test", xb.Op.wrap_function(function), shapes)
    return xb.xla_computation_as_func(computation)([t.to("xla") for t in tensors])


def values(*shape, low=-1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(shape, generator=generator) * 2 + low).to(dtype)


X, Y = values(3, 4), values(3, 4, low=0.5)
POSITIVE = values(3, 4, low=1.5)
INTS, SHIFTS = (
    torch.tensor([-9, 4, 7], dtype=torch.int32),
    torch.tensor([1, 2, 3], dtype=torch.int32),
)

UNARY = [
    (name, getattr(torch, name), Y if name in ("log", "log1p", "sqrt", "rsqrt") else X)
    for name in (
        "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "log",
        "log1p", "sqrt", "rsqrt", "sin", "sinh", "tan", "tanh",
    )
]  # fmt: skip


def test_elementwise_operations_are_torchs():
    names = [name for name, _, _ in UNARY]
    got = run(lambda x, y: [getattr(y if of is Y else x, n)() for n, _, of in UNARY], X, Y)
    assert len(got) == len(names)
    assert_same(got, [function(of) for _, function, of in UNARY])


def test_operators_of_python_are_operations():
    got = run(
        lambda x, y: [
            *(x + y, x - y, x * y, x / y, y**x, x % y, -x, x.max(y), x.min(y), x.atan2(y)),
            *(x < y, x <= y, x > y, x >= y, x == y, x != y),
            x.select(y, x) if x.shape().dtype == "pred" else (x < y).select(x, y),
            x.clamp(y, y + y),
        ],
        X,
        Y,
    )
    expected = [
        *(X + Y, X - Y, X * Y, X / Y, Y**X, torch.fmod(X, Y), -X, X.maximum(Y), X.minimum(Y)),
        *(torch.atan2(X, Y), X < Y, X <= Y, X > Y, X >= Y, X == Y, X != Y),
        *(torch.where(X < Y, X, Y), X.clamp(Y, Y + Y)),
    ]
    assert_same(got, expected)
    got = run(lambda a, b: [a & b, a | b, a ^ b, a << b, a >> b, ~a, a / b], INTS, SHIFTS)
    quotients = torch.div(INTS, SHIFTS, rounding_mode="trunc")
    wanted = [INTS & SHIFTS, INTS | SHIFTS, INTS ^ SHIFTS, INTS << SHIFTS, INTS >> SHIFTS, ~INTS]
    assert_same(got, [*wanted, quotients])


def test_shapes_are_changed_as_hlo_says():
    got = run(
        lambda x: [
            x.reshape((4, 3)),
            x.reshape((12,), dimensions=(1, 0)),
            x.broadcast((2,)),
            x.broadcast_in_dim((2, 3, 4), (1, 2)),
            x.transpose((1, 0)),
            x.rev((1,)),
            x.slice((0, 1), (3, 4), (2, 1)),
            x.slice_in_dim(1, 4, 1, 2),
            x.pad(xb.Op.scalar(x.builder(), 7.0), ((1, 0, 0), (0, 1, 1))),
            xb.Op.concat_in_dim((x, x), 1),
            x.cast(xb.Type.S32),
            x.bitcast(xb.Type.S32),
            x.get_dimension_size(1),
            xb.Op.iota(x.builder(), xb.mkshape("s64", (2, 3)), 1),
            x.scalar_like(2.5),
            x.ones_like() + x.zeros_like(),
        ],
        X,
    )
    padded = torch.full((4, 8), 7.0)
    padded[1:, 0:7:2] = X
    expected = [
        *(X.reshape(4, 3), X.t().reshape(12), X.expand(2, 3, 4), X.expand(2, 3, 4), X.t()),
        *(X.flip(1), X[::2, 1:], X[:, 1:4:2], padded, torch.cat((X, X), 1), X.int()),
        *(X.view(torch.int32), torch.tensor(4, dtype=torch.int32)),
        *(torch.arange(3).expand(2, 3), torch.full_like(X, 2.5), torch.ones_like(X)),
    ]
    assert_same(got, expected)


def test_slices_gathers_and_scatters_go_where_values_say():
    places = torch.tensor([2, 0])

    def fn(x, i, rows):
        start = i.slice_in_dim(0, 1, 0).reshape(())
        zero = start.zeros_like()
        picked = x.gather(i, (1,), (0,), (0,), 1, slice_sizes=(1, 4))
        added = x.scatter(i, rows, lambda a, b: a + b, (1,), (0,), (0,), 1)
        return [
            x.dynamic_slice((zero, start), (3, 2)),
            x.dynamic_update_slice(rows.slice_in_dim(0, 1, 0), (start, zero)),
            picked,
            added,
        ]

    rows = values(2, 4, low=0.0)
    updated = X.clone()
    updated[2] = rows[0]
    expected = [X[:, 2:4], updated, X[places], X.index_add(0, places, rows)]
    assert_same(run(fn, X, places, rows), expected)


def test_reductions_windows_and_sorts_take_computations():
    def fn(x, image, grad):
        zero = xb.Op.scalar(x.builder(), 0.0)
        add, larger = (lambda a, b: a + b), (lambda a, b: a >= b)
        pooled = image.max_pool((1, 1, 2, 2), (1, 1, 2, 2), 0, 1, (2, 3))
        back = image.select_and_scatter(grad, zero, (1, 1, 2, 2), (1, 1, 2, 2), larger, add)
        ordered = xb.Op.sort((x,), lambda a, b: a > b, 1)
        both = xb.Op.sort((x, -x), lambda a, b, c, d: a < b, 0, is_stable=True)
        return [
            x.reduce(zero, add, (0,)),
            x.reduce_all(zero, add),
            x.reduce_window(zero, add, (1, 2), (1, 2)),
            pooled,
            back,
            ordered,
            both.get_tuple_element(1),
            xb.Op.map((x, x), lambda a, b: a * b + a, (0, 1)),
        ]

    image = values(1, 2, 4, 4).requires_grad_()
    grad = values(1, 2, 2, 2)
    pooled = F.max_pool2d(image, 2)
    pooled.backward(grad)
    expected = [
        *(X.sum(0), X.sum(), X[:, ::2] + X[:, 1::2], pooled, image.grad),
        *(X.sort(1, descending=True).values, -X.sort(0).values, X * X + X),
    ]
    assert_same(run(fn, X, image.detach(), grad), expected)


def test_products_and_convolutions():
    image, kernel = values(2, 4, 5, 5), values(6, 2, 3, 3)
    last, turned = image.permute(0, 2, 3, 1).contiguous(), kernel.permute(2, 3, 1, 0).contiguous()
    matrix = torch.tril(POSITIVE[:, :3]) + torch.eye(3)

    def fn(x, y, image, kernel, last, turned, matrix):
        places = (0, 3, 2, 3, 0, 3, (1, 2), (0, 1), (1, 2))
        options = {"feature_group_count": 2}
        return [
            x @ y.transpose((1, 0)),
            image.conv(kernel, (1, 1), padding="same", **options),
            image.conv_with_general_padding(kernel, (2, 1), ((1, 0), (0, 1)), **options),
            last.conv_with_general_dimensions(turned, (1, 1), *places, **options),
            last.conv_general(turned, (1, 1), ((1, 1), (1, 1)), *places, **options),
            last.conv_general_dilated(
                turned, (1, 1), ((0, 0), (0, 0)), (1, 1), (2, 2), *places, **options
            ),
            matrix.triangualr_solve(x, True, True, False, False),
        ]

    conv = F.conv2d(image, kernel, padding=1, groups=2)
    expected = [
        X @ Y.t(),
        conv,
        F.conv2d(F.pad(image, (0, 1, 1, 0)), kernel, stride=(2, 1), groups=2),
        F.conv2d(image, kernel, groups=2).permute(0, 2, 3, 1),
        conv.permute(0, 2, 3, 1),
        F.conv2d(image, kernel, dilation=2, groups=2).permute(0, 2, 3, 1),
        torch.linalg.solve_triangular(matrix, X, upper=False),
    ]
    assert_same(run(fn, X, Y, image, kernel, last, turned, matrix), expected)


def test_control_flow():
    def fn(x, n):
        zero, builder = n.zeros_like(), x.builder()

        def more(i, total):
            return i < xb.Op.scalar(i.builder(), 4, "s64")

        def add(i, total):
            return i + xb.Op.one(i.builder(), "s64"), total + total

        loop = xb.Op.mkwhile((n, x), more, add)
        positive = (n > zero).mkconditional((x, x), lambda a, b: a + b, lambda a, b: a * b)
        double = xb.create_computation("double", lambda a: a + a, [x.shape()])
        assert builder is loop.builder()
        return [
            loop.get_tuple_element(0),
            loop.get_tuple_element(1),
            positive,
            xb.Op.call(double, (x,)),
        ]

    assert_same(run(fn, X, torch.tensor(1)), [torch.tensor(4), X * 8, X + X, X + X])
    assert_same(run(fn, X, torch.tensor(0))[2], X * X)


def test_a_computation_is_one_operation_of_the_step(compile_count):
    computation = xb.create_computation("scale", lambda a, b: a * b, xb.tensor_shape((X, Y)))
    x, y = X.to("xla"), Y.to("xla")
    torch_xla.sync()
    before = compile_count()
    for _ in range(2):
        (found,) = _XLAC._xla_user_computation("xla::scale", (x, y + 1), computation)
        assert_same(found * 2, X * (Y + 1) * 2)
    assert compile_count() == before + 1
    text = xb.get_computation_hlo(computation)
    assert text.startswith("HloModule scale")
    assert "f32[3,4]{1,0} multiply(" in text


def test_hlo_modules_are_computations():
    built = xb.create_computation(
        "both", lambda a, b: xb.Op.tuple((a + b, (a < b).cast("s64"))), xb.tensor_shape((X, Y))
    )
    read = xb.computation_from_module_proto("read", built.module_proto())
    tensors = [X.to("xla"), Y.to("xla")]
    for computation in (read, xb.computation_from_module_proto("it", built.stablehlo("cpu"))):
        found = xb.xla_computation_as_func(computation)(tensors)
        assert_same(found, [X + Y, (X < Y).long()])
    assert "s64[3,4]" in xb.get_computation_hlo(read)
    inside = run(lambda a, b: xb.Op.call(read, (a, b)).get_tuple_element(0) + a, X, Y)
    assert_same(inside, [X + Y + X])
    torch_xla.sync()
    assert "call @read" in jax_private.module_text(
        program_table.all_programs()[-1].program.stablehlo
    )
    with pytest.raises(ValueError, match="neither a serialized HLO module nor StableHLO"):
        xb.computation_from_module_proto("broken", b"no module")


def test_operands_of_two_builders_are_refused():
    first, second = xb.create_builder("first"), xb.create_builder("second")
    x, five = xb.mkparam(first, 0, xb.mkshape("f32", (2,))), xb.Op.scalar(second, 5.0)
    with pytest.raises(RuntimeError, match="different builders"):
        x + five


def test_registered_operations_tell_functions_and_arrays_apart():
    def apply(x, function=None, table=None):
        return (
            function(x)
            if table is None
            else x * xb.Op.constant(x.builder(), torch.as_tensor(table))
        )

    op, x = xor.register("apply", apply), torch.ones(2000, device="xla")
    for _ in range(10):  # functions that are defined anew may get the address of a former one
        assert op(x, function=lambda y: y - y)[0].item() == 0
        assert op(x, function=lambda y: y + y)[0].item() == 2
    tables = np.zeros((2, 2000), np.float32)
    tables[1, 1000] = 1
    assert [op(x, table=table).sum().item() for table in tables] == [0, 1]
    assert [op(x, table=torch.from_numpy(table)).sum().item() for table in tables] == [0, 1]


def test_registered_operations_are_built_once_per_shapes_and_options():
    built = []

    def slice_and_add(a, b, dimno=0):
        built.append(dimno)
        return a.slice_in_dim(0, 1, dimno) + b.slice_in_dim(1, 2, dimno)

    op = xor.register("slice_and_add", slice_and_add)
    for dimno in (0, 1, 0):
        expected = X[:1] + Y[1:2] if dimno == 0 else X[:, :1] + Y[:, 1:2]
        assert_same(op(X.to("xla"), Y.to("xla"), dimno=dimno), expected)
    assert built == [0, 1]


def test_shapes_tell_what_they_are():
    shape = xb.tensor_shape(X)
    assert (shape.shape, shape.rank, shape.sizes, shape.dtype) == (
        {"type": "f32", "sizes": (3, 4)}, 2, (3, 4), "f32",
    )  # fmt: skip
    assert shape.as_scalar().sizes == ()
    assert not shape.is_dynamic()
    builder = xb.create_builder("shapes")
    x = xb.mkparam(builder, 0, shape)
    pair = xb.Op.tuple((x, x.cast("pred"))).shape()
    assert pair.is_tuple()
    assert (pair.tuple_size(), pair.tuple_shape(1)) == (2, {"type": "pred", "sizes": (3, 4)})
    with pytest.raises(ValueError, match="a tuple, which has no sizes"):
        pair.rank  # noqa: B018
    assert xb.mkshape("s8", (2,), (True,)).is_dynamic()
    assert xb.Op.to_torch_type(xb.Type.BF16) is torch.bfloat16


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda x: x + xb.Op.scalar(x.builder(), 1, "s32"),
            r"Binary op add with different .*s32\[\]",
        ),
        (lambda x: x + x.reshape((12,)), "must be equal rank"),
        (lambda x: x.reshape((5,)), r"Reshape of f32\[3,4\]"),
        (lambda x: xb.mkop("Nope", (x.op,)), "Unknown XLA op name: Nope"),
        (lambda x: x.cast("f31"), "unknown XLA type 'f31'"),
        (lambda x: x.set_dimension_size(x.get_dimension_size(0), 0), "dynamic dimensions are not"),
        (lambda x: x.gather(x.cast("s32"), (0,), (0,), (0,), 1), "needs slice_sizes"),
    ],
)
def test_mistakes_are_reported_where_they_are_made(function, text):
    with pytest.raises(RuntimeError, match=text):
        run(function, X)


def test_arguments_have_the_shapes_of_the_parameters():
    computation = xb.create_computation("add", lambda a: a + a, [xb.mkshape("f32", (2,))])
    call = xb.xla_computation_as_func(computation)
    with pytest.raises(
        RuntimeError, match=r"got parameter 0 shape: f32\[2\], argument shape: f32\[3\]"
    ):
        call([torch.ones(3, device="xla")])
    with pytest.raises(RuntimeError, match="takes 1 arguments, got 2"):
        call([torch.ones(2, device="xla")] * 2)
    with pytest.raises(RuntimeError, match="dynamic dimensions are not supported"):
        xb.mkparam(xb.create_builder("b"), 0, xb.mkshape("f32", (2,), (True,)))
    builder = xb.create_builder("gap")
    with pytest.raises(RuntimeError, match="has no parameter 0"):
        xb.mkparam(builder, 1, xb.mkshape("f32", ())).build("gap")


def test_a_placeholder_can_be_computed_with_but_not_read():
    p = xb.create_placeholder_tensor((2, 3), torch.float32)
    assert (tuple(p.shape), p.dtype, p.device.type) == ((2, 3), torch.float32, "xla")
    assert _XLAC._is_placecholder(p)
    other = torch.ones(2, device="xla") * 3
    result = (p + 1).sum()
    assert not _XLAC._is_placecholder(result)
    with pytest.raises(RuntimeError, match="a placeholder tensor has no value"):
        torch_xla.sync()
    assert other.tolist() == [3.0, 3.0]
    for tensor in (p, result):
        with pytest.raises(RuntimeError, match="a placeholder tensor has no value"):
            tensor.tolist()
