"""Exponents, histograms, static indices, copies of parts, and pseudo-inverses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import xla_core.lowering.rules  # noqa: F401  (registers the rules)
from xla_core.testing.rules import Call
from xla_core.testing.together import together

aten = torch.ops.aten


@together
def test_exponents() -> Iterator[Call]:
    x = torch.tensor([0.0, -0.0, 1.0, -3.5, 1e30, 1e-30, 0.1])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        yield Call(aten.frexp.Tensor, x.to(dtype))
        yield Call(aten.ldexp.Tensor, x.to(dtype), torch.tensor([3, -4, 0, 7, 2, -3, 1]))
        yield Call(aten.ldexp.Tensor, x.to(dtype), torch.tensor([0.5]).to(dtype))
    yield Call(aten.ldexp.Tensor, torch.arange(4), torch.arange(4))


@together
def test_histogram_of_equal_parts() -> Iterator[Call]:
    torch.manual_seed(0)
    x = torch.randn(200)
    yield Call(aten.histc.default, x)
    yield Call(aten.histc.default, x, 7, -1, 1)
    yield Call(aten.histc.default, x.double(), 10, 0.5, 0.75)
    yield Call(aten.histc.default, torch.ones(5), 4)
    yield Call(aten.histc.default, torch.tensor([0.0, 1.0, 2.0, 3.0]), 3, 0, 3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_whole_numbers_are_counted_as_on_gpus(dtype: torch.dtype) -> None:
    experts = torch.tensor([0, 1, 1, 3, 7, 9, 100], dtype=dtype)
    for bins, low, high in ((8, 0, 7), (4, 0, 7), (10, 0, 0), (100, 0, 100)):
        counts = torch.histc(experts.to("xla"), bins, low, high)
        assert counts.dtype is dtype
        # the CPU counts floating-point numbers only
        wanted = torch.histc(experts.double(), bins, low, high)
        assert torch.equal(counts.cpu().double(), wanted)
    with pytest.raises(NotImplementedError):
        torch.histc(torch.tensor([True]).to("xla"))


@together
def test_static_indices() -> Iterator[Call]:
    x = torch.tensor([[0, 3, 0], [1, 0, 2]])
    yield Call(aten.nonzero_static.default, x, size=3)
    yield Call(aten.nonzero_static.default, x, size=2)
    yield Call(aten.nonzero_static.default, x, size=5, fill_value=-7)
    yield Call(aten.nonzero_static.default, x[:0], size=2)


@together
def test_copies_of_parts() -> Iterator[Call]:
    x = torch.arange(24.0).reshape(2, 3, 4)
    yield Call(aten.narrow_copy.default, x, 1, 1, 2)
    yield Call(aten.narrow_copy.default, x, -1, -3, 2)
    yield Call(aten._chunk_cat.default, [x, x[:1]], 0, 2)
    yield Call(aten._chunk_cat.default, [x, 2 * x], -1, 3)


@together
def test_pseudo_inverses() -> Iterator[Call]:
    torch.manual_seed(0)
    a = torch.randn(2, 4, 3, dtype=torch.float64)
    flat = a[:, :, :1] @ a[:, :1]
    square = flat.mT @ flat
    pinv = aten.linalg_pinv.atol_rtol_tensor
    yield Call(pinv, a)
    yield Call(pinv, a.mT.contiguous())
    yield Call(pinv, flat, rtol=torch.tensor(1e-6, dtype=torch.float64))
    yield Call(pinv, a, atol=torch.tensor(1.5, dtype=torch.float64))
    yield Call(pinv, square, rtol=torch.tensor([1e-6, 1e-8], dtype=torch.float64), hermitian=True)
    yield Call(pinv, torch.complex(a, a.flip(0)))
    yield Call(pinv, a[:, :0])


@together
def test_householder_reflections() -> Iterator[Call]:
    torch.manual_seed(0)
    a = torch.randn(2, 4, 3, dtype=torch.float64)
    packed, tau = torch.geqrf(a)
    yield Call(aten.geqrf.default, a)
    yield Call(aten.geqrf.default, a.mT.contiguous())
    other = torch.randn(2, 4, 5, dtype=torch.float64)
    for transpose in (False, True):
        yield Call(aten.ormqr.default, packed, tau, other, True, transpose)
        yield Call(aten.ormqr.default, packed, tau, other.mT.contiguous(), False, transpose)
