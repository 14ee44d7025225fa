"""Forms of operators that PyTorch's operator database found different from the CPU's."""

from __future__ import annotations

import pytest
import torch

import torch_xla
from xla_core.testing.against_cpu import assert_same, fallbacks

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)


def numbers(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def check(function, tolerance=None):
    with fallbacks() as ran_on_cpu:
        got = function("xla")
        torch_xla.sync()
    assert_same(got, function("cpu"), tolerance)
    assert not ran_on_cpu


# out= of operators that C++ defines by others, written through a reshaped alias of it.


def places(device, *shapes, dtype=torch.float32):
    return [torch.full(shape, 7, dtype=dtype, device=device) for shape in shapes]


RESHAPED = {
    "matmul": (lambda x, out: torch.matmul(x, x[0, :, 0], out=out), (2, 3), torch.float32),
    "linalg.matmul": (lambda x, out: torch.linalg.matmul(x, x, out=out), (2, 3, 3), torch.float32),
    "kron": (lambda x, out: torch.kron(x[0], x[1, 0], out=out), (3, 9), torch.float32),
    "inner": (lambda x, out: torch.inner(x, x[0], out=out), (2, 3, 3), torch.float32),
    "tensordot": (lambda x, out: torch.tensordot(x, x[0], 1, out=out), (2, 3, 3), torch.float32),
    "multi_dot": (lambda x, out: torch.linalg.multi_dot([x[0]] * 3, out=out), (3, 3), torch.float32),
    "matrix_rank": (lambda x, out: torch.linalg.matrix_rank(x, out=out), (2,), torch.int64),
    "matrix_rank, tol": (
        lambda x, out: torch.linalg.matrix_rank(x, 0.1, out=out), (2,), torch.int64,
    ),
    "matrix_rank, atol": (
        lambda x, out: torch.linalg.matrix_rank(x, atol=x[:, 0, 0].abs(), out=out), (2,), torch.int64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESHAPED)
def test_out_of_operators_defined_by_others(name):
    function, shape, dtype = RESHAPED[name]

    def call(device):
        empty, whole = places(device, (0,), shape, dtype=dtype)
        x = numbers(2, 3, 3).tril().to(device)
        returned = function(x, empty)
        assert returned is empty
        return function(x, whole), empty, whole

    check(call)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_of_another_size_is_resized():
    def call(device):
        (out,) = places(device, (2, 7))
        return torch.matmul(numbers(2, 3, 4).to(device), numbers(4).to(device), out=out), out

    check(call)


@pytest.mark.parametrize("function", [torch.matmul, torch.kron], ids=["matmul", "kron"])
def test_out_has_no_gradients(function):
    x = torch.ones(2, 2, device="xla", requires_grad=True)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        function(x, x, out=torch.empty(0, device="xla"))
    with torch.no_grad():
        assert function(x, x, out=torch.empty(0, device="xla")).numel() >= 4


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax], ids=["softmax", "log"])
def test_out_of_softmax_in_another_dtype(function):
    def call(device):
        out = torch.zeros(0, dtype=torch.float64, device=device)
        return function(numbers(3, 4).to(device), 1, dtype=torch.float64, out=out), out

    check(call)
    with pytest.raises(RuntimeError, match="Expected out tensor to have dtype float"):
        function(numbers(3, 4).to("xla"), 1, out=torch.zeros(3, 4, dtype=torch.float64).to("xla"))


LISTS = {
    "split_with_sizes_copy": (
        lambda x, out: torch.split_with_sizes_copy(x, [1, 4], out=out), [(1, 3), (0,)],
    ),
    "unbind_copy": (lambda x, out: torch.unbind_copy(x, 1, out=out), [(5,), (0,), (5,)]),
    "split_copy": (lambda x, out: torch.split_copy(x, 3, out=out), [(3, 3), (2, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_out_is_a_list(name):
    function, shapes = LISTS[name]

    def call(device):
        outs = places(device, *shapes)
        assert function(numbers(5, 3).to(device), outs) is None
        return outs

    check(call)
    with pytest.raises(RuntimeError, match="expected an out= argument of size"):
        function(numbers(5, 3).to("xla"), places("xla", (1, 3)))


def test_out_of_batch_norm_and_its_running_statistics():
    def call(device):
        w, b, mean, var = (numbers(3, seed=s).abs().to(device) for s in range(4))
        out, save_mean, save_invstd = places(device, (2, 3, 4), (3,), (3,))
        x = numbers(2, 3, 4).to(device)
        aten._native_batch_norm_legit.out(
            x, w, b, mean, var, True, 0.1, 1e-5,
            out=out, save_mean=save_mean, save_invstd=save_invstd,
        )  # fmt: skip
        return out, save_mean, save_invstd, mean, var

    check(call)


# Normalisation in half precision: dtypes of the saved statistics.


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("mixed", [False, True], ids=["one dtype", "mixed"])
def test_saved_statistics_in_half_precision(dtype, mixed):
    def call(device):
        x = numbers(2, 4, 5, dtype=dtype).to(device)
        kept = torch.float32 if mixed else dtype
        w, b, mean, var = (numbers(4, dtype=kept, seed=s).abs().to(device) for s in range(4))
        by = (numbers(5, dtype=kept).to(device), numbers(5, dtype=kept).to(device))
        return [
            aten.native_layer_norm(x, [5], *by, 1e-5),
            aten.native_group_norm(x, w, b, 2, 4, 5, 2, 1e-5),
            aten._native_batch_norm_legit(x, w, b, True, 0.1, 1e-5),
            aten.native_batch_norm(x, w, b, mean, var, True, 0.1, 1e-5),
            aten.native_batch_norm(x, w, b, mean, var, False, 0.1, 1e-5),
            mean,
            var,
        ]

    check(call, (2e-2, 2e-2))  # half precision is rounded in other places than on the CPU


def test_the_mean_that_gradients_subtract_is_not_a_rounded_one():
    """A mean of 300 has steps of 2 in bfloat16, as large as what is left of these numbers."""
    x = (numbers(4, 64) + 300).bfloat16()
    weights = numbers(4, 64, seed=1)

    def gradient(device, dtype):
        leaf = x.to(device, dtype).requires_grad_()
        out = torch.nn.functional.layer_norm(leaf, [64])
        return torch.autograd.grad(out, leaf, weights.to(device, dtype))[0].float().cpu()

    exact = gradient("cpu", torch.float32)
    error = (gradient("xla", torch.bfloat16) - exact).abs().max()
    assert error < 0.03 * exact.abs().max()


# Single operators.


@pytest.mark.parametrize("shape", [(2, 5), (5, 2), (0, 3), (2, 3, 5), (4, 4)], ids=str)
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("transpose", [True, False])
def test_ormqr_of_any_shape(shape, left, transpose):
    reflectors, tau = torch.geqrf(numbers(*shape))
    *batch, rows, _ = shape
    other = numbers(*batch, *((rows, 3) if left else (3, rows)), seed=1)

    def call(device):
        operands = (t.to(device) for t in (reflectors, tau, other))
        return torch.ormqr(*operands, left=left, transpose=transpose)

    check(call, (1e-4, 1e-4))  # products of several reflections


@pytest.mark.parametrize("sizes", [(4, 6, 3), (0, 6, 3), (4, 0, 3), (4, 6, 0)], ids=str)
def test_gradients_of_cdist_with_broadcast_batches(sizes):
    rows, others, features = sizes

    def call(device):
        x1 = numbers(2, 1, rows, features).to(device).requires_grad_()
        x2 = numbers(5, others, features, seed=1).to(device).requires_grad_()
        distances = torch.cdist(x1, x2)
        return (distances, *torch.autograd.grad(distances.sum(), (x1, x2)))

    check(call)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16], ids=str)
def test_native_dropout_backward_of_integers(dtype):
    def call(device):
        gradient = torch.tensor([1, 2, 3]).to(device, dtype)
        return aten.native_dropout_backward(
            gradient, torch.tensor([True, False, True]).to(device), 2.5
        )

    check(call)


def test_a_complex_number_as_a_cpu_tensor():
    def call(device):
        x, z = numbers(3).to(device), numbers(3, dtype=torch.complex64).to(device)
        number = torch.tensor(1.5 + 2j)
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((leaf * number).abs().sum(), leaf)
        wide = torch.tensor(2j, dtype=torch.complex128)
        return x * number, z + wide, torch.where(x > 0, z, number), gradient

    check(call)


# complex32, which XLA lacks: kept as complex64, rounded to half precision by every operator.

HALF = torch.complex32
Z = torch.tensor([1.1 + 2.3j, -0.7 + 1e-3j, 300.3 - 2.7j, 7e4 + 1j], dtype=torch.complex64)

COMPLEX32 = {
    "to the device": lambda z, d: z.to(HALF).to(d),
    "on the device": lambda z, d: z.to(d).to(HALF),
    "chalf": lambda z, d: z.real.to(d).chalf(),
    "sum": lambda z, d: (
        z[:3].to(HALF).to(d) + z[:3].to(HALF).to(d)
    ),  # finite: inf + inf is NaN there
    "product": lambda z, d: z.to(HALF).to(d) * (1.1 + 2j),
    "promotion": lambda z, d: z.to(HALF).to(d) + z.real.to(d),
    "real part": lambda z, d: z.to(HALF).to(d).real,
    "parts": lambda z, d: torch.view_as_real(z.to(HALF).to(d)),
    "of parts": lambda z, d: torch.view_as_complex(torch.view_as_real(z).half().to(d)),
    "of two": lambda z, d: torch.complex(z.real.half().to(d), z.imag.half().to(d)),
    "absolute": lambda z, d: z.to(HALF).to(d).abs(),
    "write to a part": lambda z, d: z.to(HALF).to(d).real.fill_(0.3),
    "write to a slice": lambda z, d: z.to(HALF).to(d)[1:3].mul_(2),
    "ones": lambda z, d: torch.ones(3, dtype=HALF, device=d),
    "copy": lambda z, d: torch.zeros(4, dtype=HALF, device=d).copy_(z.to(d)),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", COMPLEX32)
def test_complex32(name):
    def call(device):
        result = COMPLEX32[name](Z, device)
        wide = result.cpu().to(torch.complex64) if result.dtype == HALF else result
        return wide, torch.zeros((), dtype=torch.int64 if result.dtype == HALF else torch.int8)

    check(call, (2e-3, 1e-4))  # one rounding of half precision
