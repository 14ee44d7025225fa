"""Functions of ``torch.linalg`` that check their results, under ``torch.compile(backend='openxla')``.

The check (``_linalg_check_errors``) is a side effect: graphs have it as the operator of higher order
``with_effects``.
"""

from __future__ import annotations

import importlib

import pytest
import torch

import torch_xla  # noqa: F401  the device

GOOD = torch.tensor([[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 5.0]])
SINGULAR = torch.zeros(3, 3)

FUNCTIONS = {
    "cholesky": torch.linalg.cholesky,
    "inv": torch.linalg.inv,
    "solve": lambda a: torch.linalg.solve(a, a.sin()),
    "lu_factor": lambda a: torch.linalg.lu_factor(a).LU,
    "ldl_factor": lambda a: torch.linalg.ldl_factor(a).LD,
    "eigvals": lambda a: torch.linalg.eigvals(a).real.sort().values,
    "two in a row": lambda a: torch.linalg.inv(torch.linalg.cholesky(a.cos() + 3 * a)).sin(),
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["as imported", "a mode that knows no subclasses"])
def first_run(request, monkeypatch):
    """The mode that torch has on in a graph's first run, as it is when torch_xla is imported late.

    torch 2.13 keeps the list of the classes that it leaves alone from before; torch 2.15 keeps none.
    """
    if request.param != "as imported":
        wrappers = importlib.import_module("torch._functorch._aot_autograd.runtime_wrappers")
        known = (torch.Tensor, torch.nn.Parameter)
        monkeypatch.setattr(wrappers, "HANDLED_TYPES", known, raising=False)


@pytest.mark.filterwarnings("ignore:aten..linalg_ldl_factor_ex has no XLA lowering")
@pytest.mark.parametrize("backend", ["openxla", "aot_eager"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_checked_result(name, backend, first_run):
    f = FUNCTIONS[name]
    g = torch.compile(f, backend=backend)
    for scale in (1.0, 2.0):  # the first run, and one like all later ones
        torch.testing.assert_close(g((GOOD * scale).to("xla")).cpu(), f(GOOD * scale))


@pytest.mark.parametrize("name", ["cholesky", "inv", "solve"])
def test_the_gradient_of_a_checked_result(name, first_run):
    f = FUNCTIONS[name]
    here, there = GOOD.clone().requires_grad_(), GOOD.to("xla").requires_grad_()
    f(here).sum().backward()
    torch.compile(f, backend="openxla")(there).sum().backward()
    torch.testing.assert_close(there.grad.cpu(), here.grad)


@pytest.mark.parametrize("good_first", [False, True])
@pytest.mark.parametrize("name", ["cholesky", "inv", "solve"])
def test_a_singular_matrix_raises_what_eager_raises(name, good_first, first_run):
    f = FUNCTIONS[name]
    with pytest.raises(torch.linalg.LinAlgError) as wanted:
        f(SINGULAR.to("xla"))
    g = torch.compile(f, backend="openxla")
    if good_first:
        g(GOOD.to("xla"))
    with pytest.raises(torch.linalg.LinAlgError) as found:
        g(SINGULAR.to("xla"))
    # torch.fx adds the node that failed, behind the message
    assert str(found.value).startswith(str(wanted.value))
    torch.testing.assert_close(g(GOOD.to("xla")).cpu(), f(GOOD))  # and goes on
