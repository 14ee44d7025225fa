"""Operators that are recorded as one, and where they are still recorded by parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import torch_xla
from xla_core.execution import runtime
from xla_core.recording.entry import operations_of


def recorded(run: Callable[[], Any]) -> list[str]:
    """Names of the operators that ``run`` records."""
    torch_xla.sync()
    trace = runtime.trace_of(None)
    kept = run()
    names = [operation.plan.name for operation in operations_of(trace.cur.path())]
    torch_xla.sync()
    del kept
    return names


def on_both(
    run: Callable[..., Sequence[torch.Tensor]],
    *shapes: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
) -> None:
    """Compare the tensors that ``run`` gives of random ones with the CPU's."""
    torch.manual_seed(0)
    host = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    device = [t.detach().to("xla").requires_grad_() for t in host]
    for ours, theirs in zip(run(*device), run(*host), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


def gradients(function: Callable[..., torch.Tensor]) -> Callable[..., Sequence[torch.Tensor]]:
    """The function that gives the gradients of ``function``'s squares by all its operands."""
    return lambda *operands: torch.autograd.grad(function(*operands).square().sum(), operands)


LINEAR = {
    "layer": ((6, 4), (5, 4), (5,)),
    "without bias": ((6, 4), (5, 4)),
    "batches": ((2, 3, 4), (5, 4), (5,)),
    "no rows": ((0, 4), (5, 4), (5,)),
    "vector": ((4,), (5, 4), (5,)),
    "weight as a vector": ((6, 4), (4,)),
    "bias of a row each": ((6, 4), (5, 4), (6, 5)),
}


@pytest.mark.parametrize("shapes", LINEAR.values(), ids=LINEAR)
def test_linear_and_its_gradients_are_the_cpus(shapes: tuple[tuple[int, ...], ...]) -> None:
    on_both(lambda *operands: [F.linear(*operands)], *shapes)
    on_both(gradients(F.linear), *shapes)


def test_gradients_of_gradients_of_linear() -> None:
    def penalty(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
        (by_x,) = torch.autograd.grad(F.linear(x, w, b).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(by_x.square().sum(), (x, w, b))

    on_both(penalty, (2, 3, 4), (5, 4), (5,))


def test_a_layer_is_one_operation_each_way() -> None:
    x, layer = torch.randn(2, 3, 4).to("xla"), torch.nn.Linear(4, 5).to("xla")
    assert recorded(lambda: layer(x)) == ["aten.linear.default"]
    names = recorded(lambda: torch.autograd.grad(layer(x).sum(), list(layer.parameters())))
    assert [name for name in names if "sum" not in name and "expand" not in name] == [
        "aten.linear.default", "aten.ones_like.default", "aten.linear_backward.default",
    ]  # fmt: skip
    with torch.inference_mode():
        assert recorded(lambda: layer(x)) == ["aten.linear.default"]


def test_who_looks_at_operators_sees_the_parts() -> None:
    x = torch.randn(6, 4).to("xla")
    layer = torch.nn.Linear(4, 5).to("xla")
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() == 2 * (2 * 6 * 4 * 5)  # forward, and the weight's gradient


def test_forward_mode_goes_through_the_parts() -> None:
    def tangent(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(w.detach(), torch.ones_like(w))
            return [forward_ad.unpack_dual(F.linear(x, dual)).tangent]

    on_both(tangent, (6, 4), (5, 4))
    on_both(lambda x, w: [torch.func.jvp(lambda v: F.linear(x, v), (w,), (w,))[1]], (6, 4), (5, 4))


def test_mistakes_are_the_cpus() -> None:
    x = torch.randn(6, 4).to("xla")
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        F.linear(x, torch.randn(5, 3).to("xla"))
    with pytest.raises(RuntimeError, match="Input tensor is not an XLA tensor"):
        F.linear(x, torch.randn(5, 4))


# -- attention -------------------------------------------------------------------------------------

HEADS = ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6))
attention = F.scaled_dot_product_attention


def with_mask(make: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> Callable[..., Any]:
    """Attention with a mask, or what is added to the scores, made of random numbers (5, 7)."""

    def masked(*operands: torch.Tensor) -> torch.Tensor:
        numbers = torch.rand(5, 7, generator=torch.Generator().manual_seed(1))
        return attention(*operands, attn_mask=make(numbers).to(operands[0].device), **options)

    return masked


ATTENTION: dict[str, tuple[Callable[..., torch.Tensor], Sequence[tuple[int, ...]], int]] = {
    "plain": (attention, HEADS, 1),
    "causal": (lambda *o: attention(*o, is_causal=True), HEADS, 1),
    "scale": (lambda *o: attention(*o, scale=0.3), HEADS, 1),
    "one batch dimension": (attention, [shape[1:] for shape in HEADS], 1),
    "mask": (with_mask(lambda m: m > 0.5), HEADS, 1),
    "mask of nothing": (with_mask(lambda m: m > 2), HEADS, 1),
    "mask of each head": (with_mask(lambda m: (m > 0.4).expand(2, 1, 5, 7)), HEADS, 1),
    "added": (with_mask(lambda m: m.double()), HEADS, 1),
    "no queries": (attention, ((2, 3, 0, 4), *HEADS[1:]), 1),
    "heads that are shared": (
        lambda *o: attention(*o, enable_gqa=True), ((2, 6, 5, 4), *HEADS[1:]), 0
    ),
    "another batch": (attention, (HEADS[0], (1, 3, 7, 4), (1, 3, 7, 6)), 0),
    "without heads": (attention, [shape[2:] for shape in HEADS], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_and_its_gradients_are_the_cpus(name: str) -> None:
    function, shapes, whole = ATTENTION[name]
    on_both(lambda *operands: [function(*operands)], *shapes)
    on_both(gradients(function), *shapes)
    operands = [torch.zeros(shape).to("xla") for shape in shapes]
    if name != "added":  # float64
        assert recorded(lambda: function(*operands)).count("xla.attention.default") == whole


def test_gradients_of_one_tensor_in_all_places() -> None:
    on_both(gradients(lambda x: attention(x, x, x, is_causal=True)), HEADS[0])


def test_gradients_of_some_operands() -> None:
    def by_value(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        result = attention(query.detach(), key.detach(), value, is_causal=True)
        return torch.autograd.grad(result.square().sum(), value)

    on_both(by_value, *HEADS)


@pytest.mark.parametrize("operands", [3, 1])
def test_gradients_of_gradients_of_attention(operands: int) -> None:
    def penalty(*given: torch.Tensor) -> Sequence[torch.Tensor]:
        used = given * (3 // len(given))
        with sdpa_kernel(SDPBackend.MATH):  # the CPU's other ones have no second derivatives
            result = attention(*used, is_causal=True).pow(3).sum()
        first = torch.autograd.grad(result, given, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), given)]

    on_both(penalty, *HEADS[:1] * operands)


def test_gradients_of_gradients_by_one_operand() -> None:
    def penalty(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            result = attention(query, key.detach(), value.detach()).pow(3).sum()
        (first,) = torch.autograd.grad(result, query, create_graph=True)
        return torch.autograd.grad(first.square().sum(), query)

    on_both(penalty, *HEADS)


def test_attention_is_one_operation_each_way() -> None:
    operands = [torch.randn(shape).to("xla").requires_grad_() for shape in HEADS]
    names = recorded(lambda: torch.autograd.grad(attention(*operands).sum(), operands))
    assert [name for name in names if "xla." in name] == [
        "xla.attention.default", "xla.attention_backward.default",
    ]  # fmt: skip
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert recorded(lambda: attention(*operands)) == ["xla.attention.default"]


def test_half_precision_is_rounded_once() -> None:
    on_both(lambda *o: [attention(*o)], *HEADS, dtype=torch.bfloat16)
    operands = [torch.randn(shape).to("xla").requires_grad_() for shape in HEADS]
    with torch.autocast("xla", dtype=torch.bfloat16):
        result = attention(*operands)
    assert result.dtype == torch.bfloat16
    exact = [t.detach().cpu().requires_grad_() for t in operands]
    expected = torch.autograd.grad(attention(*exact).sum(), exact)
    for ours, theirs in zip(torch.autograd.grad(result.sum(), operands), expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0.05, atol=0.05)


def test_transforms_see_the_parts_of_attention() -> None:
    def batched(*operands: torch.Tensor) -> Sequence[torch.Tensor]:
        return [torch.vmap(attention)(*operands), torch.vmap(attention, (0, None, None))(*operands)]

    on_both(batched, *HEADS)
    on_both(lambda *o: torch.func.grad(lambda *x: attention(*x).sum(), (0, 1, 2))(*o), *HEADS)
    tangents = lambda *o: torch.func.jvp(attention, o, o)  # noqa: E731
    on_both(tangents, *HEADS)
    operands = [torch.randn(shape).to("xla") for shape in HEADS]
    with FlopCounterMode(display=False) as counter:
        attention(*operands)
    assert counter.get_total_flops() == 2 * (2 * 3 * 5 * 7 * (4 + 6))


def test_gradients_of_a_mask() -> None:
    shapes = (*HEADS, (5, 7))
    on_both(gradients(lambda q, k, v, bias: attention(q, k, v, attn_mask=bias)), *shapes)


def test_compiled_attention() -> None:
    compiled = torch.compile(lambda *o: attention(*o, is_causal=True), backend="openxla")
    operands = [torch.randn(shape) for shape in HEADS]
    ours = compiled(*[t.to("xla") for t in operands])
    torch.testing.assert_close(ours.cpu(), attention(*operands, is_causal=True))


def test_mistakes_in_attention_are_the_cpus() -> None:
    query, key, value = [torch.randn(shape).to("xla") for shape in HEADS]
    with pytest.raises(RuntimeError, match="same dtype"):
        attention(query, key.double(), value)
    with pytest.raises(RuntimeError):
        attention(query, key, value[:, :, :3])
    mask = torch.ones(5, 7, dtype=torch.bool).to("xla")
    with pytest.raises(RuntimeError, match="is_causal"):
        attention(query, key, value, attn_mask=mask, is_causal=True)


# -- LSTM cells ------------------------------------------------------------------------------------

CELL = ((3, 5), (3, 4), (3, 4), (16, 5), (16, 4), (16,), (16,))


def lstm_cell(x: Any, h: Any, c: Any, *weights: Any) -> Sequence[torch.Tensor]:
    """The cell with its operands one by one."""
    return torch.lstm_cell(x, (h, c), *weights)


def test_lstm_cell_and_its_gradients_are_the_cpus() -> None:
    shapes = CELL, CELL[:5], ((0, 5), (0, 4), (0, 4), *CELL[3:])
    for each in shapes:
        on_both(lstm_cell, *each)
        on_both(gradients(lambda *o: torch.cat(lstm_cell(*o))), *each)
    for state in (0, 1):  # one of the two has no gradient
        on_both(gradients(lambda *o, which=state: lstm_cell(*o)[which]), *CELL)


def test_gradients_of_gradients_of_lstm_cell() -> None:
    def penalty(x: torch.Tensor, *rest: torch.Tensor) -> Sequence[torch.Tensor]:
        (first,) = torch.autograd.grad(lstm_cell(x, *rest)[0].sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, *rest[:3]))

    on_both(penalty, *CELL)


def test_lstm_cell_is_three_operations() -> None:
    cell = torch.nn.LSTMCell(5, 4).to("xla")
    x = torch.randn(3, 5).to("xla")
    state = torch.zeros(3, 4).to("xla"), torch.zeros(3, 4).to("xla")
    whole = ["aten.linear.default"] * 2 + ["aten._thnn_fused_lstm_cell.default"]
    assert recorded(lambda: cell(x, state)) == whole
    names = recorded(lambda: torch.autograd.grad(cell(x, state)[0].sum(), list(cell.parameters())))
    assert names.count("aten._thnn_fused_lstm_cell_backward_impl.default") == 1
    with torch.inference_mode():
        assert recorded(lambda: cell(x, state)) == whole


def test_autocast_reaches_the_products_of_a_cell() -> None:
    operands = [torch.randn(shape).to("xla") for shape in CELL]
    with torch.autocast("xla", dtype=torch.bfloat16):
        hidden, state = lstm_cell(*operands)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = lstm_cell(*[t.cpu() for t in operands])
    assert (hidden.dtype, state.dtype) == (expected[0].dtype, expected[1].dtype)
    torch.testing.assert_close(hidden.cpu(), expected[0], rtol=0.05, atol=0.05)


def test_transforms_see_the_parts_of_a_cell() -> None:
    on_both(lambda *o: torch.func.grad(lambda *x: lstm_cell(*x)[1].sum(), (0, 1, 2, 3))(*o), *CELL)
    on_both(lambda *o: torch.func.jvp(lambda *x: lstm_cell(*x)[0], o, o), *CELL)


def test_mistakes_in_a_cell_are_the_cpus() -> None:
    operands = [torch.randn(shape) for shape in CELL]
    for place, shape in ((0, (3, 6)), (1, (2, 4)), (1, (3, 5))):
        wrong = list(operands)
        wrong[place] = torch.randn(shape)
        with pytest.raises(RuntimeError) as theirs:
            lstm_cell(*wrong)
        with pytest.raises(RuntimeError) as ours:
            lstm_cell(*[t.to("xla") for t in wrong])
        assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]


# -- convolutions and batch norm -----------------------------------------------------------------------


WHOLE_BATCH_NORM = ["xla.batch_norm_inference.default"]
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5), (2, 3, 4, 5), (0, 3, 4)])
def test_batch_norm_in_evaluation_is_one_operator(mode, affine, shape):
    torch.manual_seed(0)
    layer = torch.nn.BatchNorm1d if len(shape) < 4 else torch.nn.BatchNorm2d
    host = layer(3, affine=affine).eval()
    for tensor in (*host.parameters(), *host.buffers()):
        if tensor.is_floating_point():
            torch.nn.init.uniform_(tensor, 0.5, 2.0)
    x = torch.randn(shape)
    expected = host(x).detach()
    device, given = host.to("xla"), x.to("xla")
    with mode():
        assert recorded(lambda: device(given)) == WHOLE_BATCH_NORM
        torch.testing.assert_close(device(given).cpu(), expected)


def test_batch_norm_whole_and_by_parts_agree_bit_by_bit():
    torch.manual_seed(0)
    device = torch.nn.BatchNorm2d(5).to("xla").eval()
    with torch.no_grad():
        device.running_mean.normal_()
        device.running_var.uniform_(0.1, 3.0)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x = torch.randn(3, 5, 7, 7).to("xla", dtype)
            layer = device if dtype == torch.bfloat16 else device.to(dtype)
            whole = layer(x)
            with torch.enable_grad():
                by_parts = layer(x)
            assert by_parts.requires_grad
            assert whole.dtype == by_parts.dtype
            assert torch.equal(whole.cpu(), by_parts.detach().cpu())


def test_batch_norm_keeps_its_parts_where_they_are_needed():
    device = torch.nn.BatchNorm1d(3).to("xla").eval()
    x = torch.randn(4, 3).to("xla")
    assert WHOLE_BATCH_NORM[0] not in recorded(lambda: device(x))  # its parameters want gradients
    before = device.running_mean.cpu()
    with torch.no_grad():
        assert WHOLE_BATCH_NORM[0] not in recorded(lambda: device.train()(x))
        assert not torch.equal(device.running_mean.cpu(), before)
        assert WHOLE_BATCH_NORM[0] not in recorded(
            lambda: torch.func.vmap(device.eval())(x.unsqueeze(0))
        )
        with FlopCounterMode(display=False):
            assert WHOLE_BATCH_NORM[0] not in recorded(lambda: device(x))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 4, 5), (1, 3, 2), (0, 3, 4)])
def test_batch_norm_has_the_cpus_gradients_and_statistics(training, shape):
    torch.manual_seed(0)
    layer = torch.nn.BatchNorm1d if len(shape) < 4 else torch.nn.BatchNorm2d
    host = layer(3, dtype=torch.float64).train(training)
    device = layer(3, dtype=torch.float64).train(training).to("xla")
    x = torch.randn(shape, dtype=torch.float64)
    found = []
    for module, given in ((host, x.clone()), (device, x.to("xla"))):
        given.requires_grad_()
        module(given).square().sum().backward()
        found.append([given.grad, *[p.grad for p in module.parameters()], *module.buffers()])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_refuses_what_the_cpu_refuses(training):
    mistakes = {
        "running_mean": lambda x, n: F.batch_norm(x, n[:2], n, training=training),
        "weight": lambda x, n: F.batch_norm(x, n, n, n[:2], n, training),
        "bias": lambda x, n: F.batch_norm(x, n, n, n, n[:2], training),
    }
    for wrong in mistakes.values():
        texts = []
        for device in ("cpu", "xla"):
            x, n = torch.ones(4, 3, device=device), torch.ones(3, device=device)
            with torch.no_grad(), pytest.raises(RuntimeError) as caught:
                wrong(x, n)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]


CONVOLUTIONS = {
    "1d": (F.conv1d, (2, 4, 9), (6, 4, 3), {}),
    "2d": (F.conv2d, (2, 4, 9, 8), (6, 4, 3, 2), {"stride": 2, "padding": (1, 0)}),
    "3d": (F.conv3d, (2, 4, 5, 6, 4), (6, 4, 3, 2, 2), {"dilation": (1, 2, 1)}),
    "groups": (F.conv2d, (2, 4, 9, 8), (6, 2, 3, 3), {"groups": 2}),
    "same": (F.conv2d, (2, 4, 9, 8), (6, 4, 3, 3), {"padding": "same"}),
    "one image": (F.conv2d, (4, 9, 8), (6, 4, 3, 3), {}),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("case", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions_without_gradients(case, biased, mode):
    function, *shapes, options = case
    torch.manual_seed(0)
    x, weight = (torch.randn(shape) for shape in shapes)
    host = (x, weight, torch.randn(len(weight)) if biased else None)
    device = [None if t is None else t.to("xla").requires_grad_() for t in host]
    with mode():
        whole = function(*device, **options)
        assert "aten.convolution.default" in recorded(lambda: function(*device, **options))
        expected = function(*host, **options)
    by_parts = function(*device, **options)
    assert by_parts.requires_grad and not whole.requires_grad
    assert torch.equal(whole.cpu(), by_parts.detach().cpu())
    torch.testing.assert_close(whole.cpu(), expected)


def test_convolutions_refuse_what_the_cpu_refuses():
    mistakes = (
        lambda x, w: F.conv2d(x, w[:, :2]),
        lambda x, w: F.conv2d(x, w, w[0, 0, 0].double()),
        lambda x, w: F.conv2d(x, w, stride=0),
        lambda x, w: F.conv2d(x.double(), w),
        lambda x, w: F.conv2d(x[0, 0], w),
        lambda x, w: F.conv2d(x[:, :, :2], w),
    )
    for wrong in mistakes:
        raised = []
        for without in (torch.no_grad, torch.enable_grad):
            x, w = torch.ones(2, 3, 5, 5), torch.ones(3, 3, 3, 3)
            with without(), pytest.raises(RuntimeError) as caught:
                wrong(x.to("xla"), w.to("xla").requires_grad_())
            raised.append(str(caught.value))
        assert raised[0] == raised[1]


def test_modes_and_autocast_see_convolutions_without_gradients():
    x, w = torch.randn(2, 3, 5, 5).to("xla"), torch.randn(4, 3, 3, 3).to("xla")
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        F.conv2d(x, w)
    assert counted.get_total_flops() == 2 * 2 * 4 * 9 * 3 * 9
    with torch.no_grad(), torch.autocast("xla", dtype=torch.bfloat16):
        assert F.conv2d(x, w).dtype == torch.bfloat16
    with torch.no_grad():
        many = torch.func.vmap(F.conv2d, in_dims=(None, 0))(x, torch.stack([w, w + 1]))
        assert torch.equal(many[0].cpu(), F.conv2d(x, w).cpu())
