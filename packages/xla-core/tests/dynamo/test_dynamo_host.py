"""``torch.compile`` on ``xla``: graphs that make or take host tensors, and loops of torch's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.while_loop import while_loop

import torch_xla

X = torch.arange(6.0).reshape(2, 3)
ENDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "cpu": lambda y: y.cpu(),
    "to": lambda y: y.to("cpu", torch.float64),
    "detach": lambda y: y.detach().cpu(),
    "several": lambda y: (y, y.cpu(), y + 1),
    "on": lambda y: y.cpu() + 1,
    "back": lambda y: (y.cpu() * 2).to(y.device) + y,
    "item": lambda y: y.sum().item(),
    "tolist": lambda y: y.tolist(),
    "numpy": lambda y: y.cpu().numpy(),
    "branch": lambda y: y + 1 if y.sum() > 3 else y - 1,
}


@pytest.fixture(autouse=True)
def _forget_graphs() -> None:
    torch._dynamo.reset()


def values(found: Any) -> list[torch.Tensor]:
    several = found if isinstance(found, tuple) else (found,)
    return [torch.as_tensor(one).cpu().float() for one in several]


@pytest.mark.parametrize("end", ENDS)
def test_functions_that_end_on_the_host(end: str) -> None:
    def function(x: torch.Tensor) -> Any:
        return ENDS[end](torch.sin(x) * 2)

    compiled = torch.compile(function, backend="openxla")
    for factor in (1.0, 2.0, 2.0):  # the second and third run what the first recorded
        found, expected = compiled((X * factor).to("xla")), function(X * factor)
        torch.testing.assert_close(values(found), values(expected))
        if end in ("cpu", "to", "detach", "on"):
            assert found.device.type == "cpu"


def test_a_tensor_of_the_host_is_read_on_every_call() -> None:
    offset = torch.ones(3)
    compiled = torch.compile(lambda x, y: x * y.to("xla") + offset.to("xla"), backend="openxla")
    for factor in (1.0, 2.0, 3.0):
        offset.fill_(factor)
        found = compiled(X.to("xla"), torch.full((3,), factor))
        torch.testing.assert_close(found.cpu(), X * factor + factor)


def test_gradients_pass_a_graph_that_hands_a_value_to_the_host() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = (x * w).sin().sum()
        return loss, loss.cpu()

    weight, expected = torch.ones(3), torch.ones(3, requires_grad=True)
    function(X, expected)[0].backward()
    on_xla = weight.to("xla").requires_grad_()
    loss, on_host = torch.compile(function, backend="openxla")(X.to("xla"), on_xla)
    loss.backward()
    assert on_host.device.type == "cpu" and loss.item() == on_host.item()
    assert on_xla.grad is not None and expected.grad is not None
    torch.testing.assert_close(on_xla.grad.cpu(), expected.grad)


def doubled(count: int) -> list[torch.Tensor]:
    start = (torch.tensor(0, device="xla"), torch.ones(count, device="xla"))
    found: Any = while_loop(lambda i, _x: i < 5, lambda i, x: (i + 1, x * 2), start)  # type: ignore[no-untyped-call]
    return list(found)


def test_torchs_while_loop_over_several_shapes() -> None:
    for count in (3, 4, 6):  # from the second on, torch hands sizes over as numbers
        steps, found = doubled(count)
        assert steps.item() == 5 and found.tolist() == [32.0] * count


def test_torchs_while_loop_inside_a_compiled_function() -> None:
    compiled = torch.compile(
        lambda i, x: while_loop(lambda i, _x: i < 5, lambda i, x: (i + 1, x * 2), (i, x)),
        backend="openxla",
    )
    for count in (3, 4):
        steps, found = compiled(torch.tensor(0, device="xla"), torch.ones(count, device="xla"))
        assert steps.item() == 5 and found.tolist() == [32.0] * count


def test_torchs_while_loop_needs_no_import_of_ours() -> None:
    script = """
import torch, torch_xla
from torch._higher_order_ops.while_loop import while_loop
start = (torch.tensor(0, device="xla"), torch.ones(3, device="xla"))
print(while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x * 2), start)[1].tolist())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[32.0, 32.0, 32.0]", done.stderr


def test_the_default_backend_says_which_one_to_use():
    x = torch.ones(2, device="xla")
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match='backend="openxla"'
    ) as caught:
        torch.compile(lambda t: t.sin() + 1)(x)
    assert caught.value.__cause__ is None  # the user's line, and nothing of Dynamo's
    torch.testing.assert_close(
        torch.compile(lambda t: t + 1, backend="eager")(x).cpu(), torch.full((2,), 2.0)
    )


def masked(a):
    torch._dynamo.graph_break()
    kept = a[a > 1]
    torch_xla.sync()
    return (
        a.nonzero().float().sum() + kept.sum() + torch.linalg.eigvals(torch.eye(2).to(a)).real.sum()
    )


def test_of_what_runs_between_graphs_nothing_but_the_function_is_compiled():
    """jax's functions, which Dynamo replaced by its own, raised TypeError where a program was lowered."""
    torch._dynamo.utils.clear_compilation_metrics()
    found = torch.compile(masked, backend="openxla")(X.to("xla"))
    torch.testing.assert_close(found.cpu(), masked(X))
    files = {metrics.co_filename for metrics in torch._dynamo.utils.get_compilation_metrics()}
    assert files == {__file__}


@pytest.mark.skipif(
    not hasattr(torch._subclasses.FakeTensor, "_normalize_fake_device"), reason="torch before 2.13"
)
def test_factories_on_the_device_without_a_number():
    compiled = torch.compile(lambda a: torch.arange(3.0, device="xla") + a, backend="openxla")
    assert compiled(torch.ones(3, device="xla")).tolist() == [1, 2, 3]
