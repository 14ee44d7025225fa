"""PyTorch's own attention kernels for the CPU, called by name."""

from __future__ import annotations

import pytest
import torch

import xla_core.lowering.rules as rules
from xla_core.testing.against_cpu import fallbacks
from xla_core.testing.rules import Call
from xla_core.testing.together import together

aten = torch.ops.aten
assert rules.__name__  # importing the package is what registers the rules
attention = aten._scaled_dot_product_flash_attention_for_cpu.default
backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def operands(heads=3, shared=3, queries=5):
    torch.manual_seed(0)
    return [torch.randn(2, h, n, 8) for h, n in ((heads, queries), (shared, 7), (shared, 7))]


@pytest.mark.parametrize("is_causal", [False, True])
@together
def test_attention(is_causal):
    for given in (operands(), operands(heads=6), operands(queries=7)):
        yield Call(attention, *given, 0.0, is_causal)
        yield Call(attention, *given, 0.0, is_causal, scale=0.3)
    mask = torch.randn(2, 1, 5, 7)
    yield Call(attention, *operands(), 0.0, is_causal, attn_mask=mask)
    yield Call(
        attention, *(x.bfloat16() for x in operands()), 0.0, is_causal, tolerance=(2e-2, 1e-2)
    )


@pytest.mark.parametrize("is_causal", [False, True])
@together
def test_gradients(is_causal):
    for mask in (None, torch.randn(2, 3, 5, 7)):
        given = operands()
        out, total = attention(*given, 0.0, is_causal, attn_mask=mask)
        grad = torch.randn_like(out)
        yield Call(backward, grad, *given, out, total, 0.0, is_causal, attn_mask=mask)


def test_gradients_of_shared_heads():
    given = operands(heads=6)
    got, expected = (
        [x.detach().to(device).requires_grad_() for x in given] for device in ("xla", "cpu")
    )
    with fallbacks() as on_the_cpu:
        attention(*got)[0].square().sum().backward()
    assert not on_the_cpu
    # PyTorch's own backward kernel on the CPU takes no shared heads: what they are is written out
    whole = [expected[0], *(x.repeat_interleave(2, 1) for x in expected[1:])]
    attention(*whole)[0].square().sum().backward()
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x.grad.cpu(), y.grad)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dropout_p": 0.5},
        {"attn_mask": torch.ones(5, 7, dtype=torch.bool)},
    ],
    ids=str,
)
def test_what_the_cpu_refuses_is_refused(wrong):
    for device in ("cpu", "xla"):
        moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in wrong.items()}
        with pytest.raises(RuntimeError, match="scaled_dot_product_attention_flash_attention"):
            attention(*(x.to(device) for x in operands()), **moved)
