"""Special functions and orthogonal polynomials against PyTorch's CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import scipy.special
import torch

import xla_core.lowering.rules  # noqa: F401  (registers the rules)
from xla_core.testing.rules import Call, evaluate
from xla_core.testing.together import together

aten = torch.ops.aten

POSITIVE = torch.cat([torch.logspace(-8, 2, 60), torch.linspace(0.1, 60, 90)]).double()
BOTH_SIDES = torch.cat([-POSITIVE, torch.zeros(1), POSITIVE]).double()
# The approximations are good to about 1e-15 of the largest value around.
NEAR = (1e-9, 1e-13)


BESSEL = {
    "bessel_j0": scipy.special.j0,
    "bessel_j1": scipy.special.j1,
    "bessel_y0": scipy.special.y0,
    "bessel_y1": scipy.special.y1,
    "modified_bessel_k0": scipy.special.k0,
    "modified_bessel_k1": scipy.special.k1,
    "scaled_modified_bessel_k0": scipy.special.k0e,
    "scaled_modified_bessel_k1": scipy.special.k1e,
}


@pytest.mark.parametrize("name", BESSEL)
def test_bessel_functions(name: str) -> None:
    # Against SciPy: PyTorch's own kernels have errors of 1e-7 in float64.
    x = BOTH_SIDES if name in ("bessel_j0", "bessel_j1") else POSITIVE
    (found,) = evaluate(getattr(aten, f"special_{name}").default, x)
    expected = torch.from_numpy(BESSEL[name](x.numpy()))
    torch.testing.assert_close(found, expected, rtol=NEAR[0], atol=NEAR[1])


@together
def test_bessel_functions_at_the_edges() -> Iterator[Call]:
    edges = torch.tensor([0.0, -0.0, torch.nan], dtype=torch.float64)
    for name in BESSEL:
        overload = getattr(aten, f"special_{name}").default
        yield Call(overload, POSITIVE[::5].float(), tolerance=(1e-5, 1e-6))
        yield Call(overload, torch.arange(5), tolerance=(1e-5, 1e-6))
        yield Call(overload, edges)
        if name not in ("bessel_j0", "bessel_j1"):
            yield Call(overload, torch.tensor([-1.0]))


@together
def test_other_functions() -> Iterator[Call]:
    edges = torch.tensor([0.0, -1.0, torch.inf, torch.nan], dtype=torch.float64)
    yield Call(aten.special_spherical_bessel_j0.default, BOTH_SIDES, tolerance=NEAR)
    yield Call(aten.special_spherical_bessel_j0.default, edges, tolerance=NEAR)
    yield Call(aten.special_erfcx.default, BOTH_SIDES[80:], tolerance=NEAR)


@together
def test_zeta() -> Iterator[Call]:
    q = torch.cat([torch.linspace(0.05, 30, 50), torch.tensor([1e3, 1e6])]).double()
    for x in (1.5, 2.0, 7.0):
        yield Call(aten.special_zeta.self_scalar, x, q)
        yield Call(aten.special_zeta.default, torch.tensor([x]), q.float())
    x, q = [1.0, 0.5, 2.0, 2.5, 3.0, torch.nan], [2.0, 2.0, 0.0, -1.5, -2.0, 1.0]
    yield Call(aten.special_zeta.default, torch.tensor(x), torch.tensor(q))


@together
def test_polygamma() -> Iterator[Call]:
    # Between the poles of the negative side, where XLA's own zeta function is wrong.
    x = torch.tensor([-20.3, -8.4784, -1.5, -0.3, 0.2, 1.0, 9.7, 300.0])
    for n in range(5):
        yield Call(aten.polygamma.default, n, x)
        yield Call(aten.polygamma.default, n, x.double(), tolerance=(1e-8, 1e-12))


@together
def test_logsumexp_of_complex_numbers() -> Iterator[Call]:
    x = torch.tensor([[1783 + 1563j, 3 - 40j], [1789 + 1321j, -3 + 2j], [1700 + 3j, 2.5 + 9j]])
    yield Call(aten.logsumexp.default, x, [0])


@together
def test_polygamma_at_poles_and_far_away() -> Iterator[Call]:
    x = torch.tensor([-8.0, -7.0, -1.0, 0.0, -1e9, -torch.inf, torch.nan])
    yield Call(aten.polygamma.default, 1, x[:4])
    yield Call(aten.polygamma.default, 1, torch.tensor([-8, -1, 0, 5], dtype=torch.int8))
    yield Call(aten.polygamma.default, 2, x)  # summing from there to 0 would never end
    yield Call(aten.special_zeta.default, torch.full_like(x, 3), x)


FAMILIES = [
    *(f"{shift}chebyshev_polynomial_{kind}" for shift in ("", "shifted_") for kind in "tuvw"),
    "hermite_polynomial_h",
    "hermite_polynomial_he",
    "laguerre_polynomial_l",
    "legendre_polynomial_p",
]


@together
def test_polynomials() -> Iterator[Call]:
    x, n = torch.linspace(-1.5, 1.5, 9).double()[:, None], torch.tensor([-1, 0, 1, 2, 3, 6, 9])
    for family in FAMILIES:
        packet = getattr(aten, f"special_{family}")
        yield Call(packet.default, x, n)
        yield Call(packet.n_scalar, x.float(), 4)
        yield Call(packet.x_scalar, 0.3, n)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_polynomials(family: str) -> None:
    overload = getattr(aten, f"special_{family}").default
    (found,) = evaluate(overload, torch.zeros(0), torch.zeros(0))
    assert found is not None
    assert found.shape == (0,)
