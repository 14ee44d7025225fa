"""Eigenvalues without symmetry, least squares, and reductions of segments, against the CPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from xla_core.dispatch.cpu_fallback import FallbackWarning
from xla_core.execution.runtime import trace_of
from xla_core.testing.against_cpu import assert_agrees_with_cpu, assert_same

T = torch.tensor
NAN = math.nan
# Both sides call LAPACK, of different makes, which block differently; least squares square the condition.
LOOSE = (1e-3, 1e-4)


agree = functools.partial(assert_agrees_with_cpu, tolerance=LOOSE)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=dtype)


def gradients(call: Callable[..., torch.Tensor], *args: torch.Tensor) -> None:
    found = []
    for device in ("cpu", "xla"):
        given = [a.to(device).requires_grad_() for a in args]
        used = torch.autograd.grad(call(*given), given, allow_unused=True)
        found.append([g for g in used if g is not None])
    assert_same(found[1], found[0], LOOSE)


MATRICES = {
    "real": drawn(4, 4),
    "a batch": drawn(2, 3, 3),
    "complex": drawn(3, 3, dtype=torch.complex64),
    "double": drawn(3, 3, dtype=torch.float64),
    "nothing": torch.ones(2, 0, 0),
    "not finite": T([[1.0, NAN], [0.0, 1.0]]),
    "not square": torch.ones(2, 3),
    "bfloat16": torch.ones(2, 2).bfloat16(),
}


@pytest.mark.parametrize("name", MATRICES)
def test_eig(name: str, fallbacks: Callable[[], dict[str, int]]) -> None:
    def up_to_scale(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, vectors = torch.linalg.eig(x)
        return values, vectors.abs(), x.to(vectors.dtype) @ vectors - vectors * values[..., None, :]

    agree(up_to_scale, MATRICES[name])
    assert fallbacks() == {}


def test_gradients_of_eigenvalues(fallbacks: Callable[[], dict[str, int]]) -> None:
    gradients(lambda a: torch.linalg.eigvals(a).abs().sum(), drawn(3, 3))
    gradients(lambda a: torch.linalg.eig(a)[1].abs().square().cos().sum(), drawn(3, 3))
    assert fallbacks() == {}


def test_eig_runs_on_the_cpu_for_other_platforms(
    monkeypatch: pytest.MonkeyPatch, fallbacks: Callable[[], dict[str, int]]
) -> None:
    x = drawn(3, 3).to("xla")
    monkeypatch.setattr(trace_of(x.device).backend, "platform", "tpu")
    with pytest.warns(FallbackWarning, match="linalg_eig"):
        values = torch.linalg.eigvals(x)
    monkeypatch.undo()
    assert_same(values, torch.linalg.eigvals(drawn(3, 3)))
    assert fallbacks() == {"aten::linalg_eig": 1}


DEPENDENT = T([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])
SYSTEMS = {
    "tall": (drawn(3, 2), drawn(3, 1)),
    "a vector": (drawn(3, 2), drawn(3)),
    "wide": (drawn(2, 3), drawn(2, 2)),
    "a batch": (drawn(2, 3, 2), drawn(2, 3, 4)),
    "a batch of vectors": (drawn(2, 3, 2), drawn(2, 3)),
    "complex": (drawn(3, 2, dtype=torch.complex64), drawn(3, 1, dtype=torch.complex64)),
    "dependent columns": (DEPENDENT, drawn(3, 1)),
    "no rows": (torch.zeros(0, 2), torch.zeros(0, 1)),
    "no columns": (torch.zeros(3, 0), drawn(3, 1)),
    "too few rows": (drawn(3, 2), drawn(2, 1)),
    "two dtypes": (drawn(3, 2), drawn(3, 1).double()),
    "vectors": (drawn(2), drawn(2)),
}


@pytest.mark.parametrize("driver", [None, "gels", "gelsd"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_lstsq(name: str, driver: str | None, fallbacks: Callable[[], dict[str, int]]) -> None:
    agree(torch.linalg.lstsq, *SYSTEMS[name], driver=driver)
    assert fallbacks() == {}


def test_parameters_of_lstsq() -> None:
    agree(torch.linalg.lstsq, drawn(3, 2), drawn(3, 1), driver="gelss", rcond=0.9)
    agree(torch.linalg.lstsq, drawn(3, 2), drawn(3, 1), rcond=-1.0)
    agree(torch.linalg.lstsq, drawn(3, 2), drawn(3, 1), driver="other")


def test_gradients_of_least_squares(fallbacks: Callable[[], dict[str, int]]) -> None:
    a, b = drawn(4, 2), drawn(4, 2).flip(0, 1)
    gradients(lambda a, b: torch.linalg.lstsq(a, b).solution.sin().sum(), a, b)
    gradients(lambda a, b: torch.linalg.lstsq(a, b, driver="gels").residuals.sum(), a, b)
    assert fallbacks() == {}


# -- segments -------------------------------------------------------------------------------------

DATA = T([[1.0, 2], [0, 3], [0, 4], [5, NAN], [5, 6]])
LENGTHS, OFFSETS = T([2, 0, 2, 1]), T([0, 2, 2, 4, 5])
REDUCTIONS = ["sum", "mean", "max", "min", "prod"]


def reduced(reduce: str, data: torch.Tensor, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    data = data.detach().requires_grad_()
    y = torch.segment_reduce(data, reduce, **named)
    weights = torch.arange(1.0, y.numel() + 1, device=data.device).reshape(y.shape)
    (gradient,) = torch.autograd.grad(y, data, weights)
    return y.detach(), gradient


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_segments_and_their_gradients(reduce: str, fallbacks: Callable[[], dict[str, int]]) -> None:
    agree(reduced, reduce, DATA, lengths=LENGTHS)
    agree(reduced, reduce, DATA, lengths=LENGTHS, initial=2.0)
    agree(reduced, reduce, DATA, offsets=OFFSETS, initial=1)
    agree(reduced, reduce, drawn(2, 3, 2), lengths=T([[1, 2], [0, 3]]), axis=1)
    agree(reduced, reduce, drawn(2, 3, 2), offsets=T([[0, 1, 3], [0, 0, 3]]), axis=1)
    agree(reduced, reduce, drawn(4), lengths=T([1, 3]), unsafe=True)
    assert fallbacks() == {}


def test_wrong_segments() -> None:
    def total(data: torch.Tensor, **named: Any) -> torch.Tensor:
        return torch.segment_reduce(data, "sum", **named)

    agree(total, DATA, lengths=T([1, 2]))
    agree(total, DATA, lengths=T([-1, 6]))
    agree(total, DATA.long(), lengths=LENGTHS)
    agree(total, DATA, lengths=LENGTHS.float())
    agree(total, DATA[:0], lengths=LENGTHS)
    agree(total, DATA, lengths=LENGTHS, axis=1)
    agree(total, DATA)
    agree(torch.segment_reduce, DATA, "other", lengths=LENGTHS)


def test_polygamma_in_place(fallbacks: Callable[[], dict[str, int]]) -> None:
    for n in range(4):
        agree(lambda x, n=n: x.clone().polygamma_(n), T([0.5, 1.5, 3.0]))
    agree(lambda x: x.clone().polygamma_(1), T([1, 2]))
    assert fallbacks() == {}
