"""``XLA_CHECK_INDICES``: an index out of range is an IndexError when the step has run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torch_xla
from torch_xla import experimental
from xla_core.execution import index_checks
from xla_core.recording import xla_tensor as tensor_module

TABLE = torch.arange(12.0).reshape(3, 4)


@pytest.fixture(autouse=True)
def _checking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XLA_CHECK_INDICES", "1")
    kept = dict(tensor_module._plain)  # handlers are made at an operator's first use
    tensor_module._plain.clear()
    tensor_module.set_handler_wrapper(None)
    yield
    index_checks.pending.clear()
    tensor_module._plain.clear()
    tensor_module._plain.update(kept)
    tensor_module.set_handler_wrapper(None)


def whole(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def assigned(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[i] = 0
    return y


# the index that is given -> what is done with it; most take rows, of which there are three
CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "embedding": lambda x, i: F.embedding(i, x),
    "embedding_bag": lambda x, i: F.embedding_bag(i, x, torch.zeros_like(i[:1])),
    "index": lambda x, i: x[i],
    "assignment": assigned,
    "index_put": lambda x, i: x.index_put((i,), x.sum()),
    "index_select": lambda x, i: x.index_select(0, i),
    "index_add": lambda x, i: x.index_add(0, i, x[: len(i)]),
    "index_copy": lambda x, i: x.index_copy(0, i, x[: len(i)]),
    "index_fill": lambda x, i: x.index_fill(0, i, 1.0),
    "gather": lambda x, i: x.gather(0, i.unsqueeze(1)),
    "scatter": lambda x, i: x.scatter(0, i.unsqueeze(1), 1.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i.unsqueeze(1), x),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, i.unsqueeze(1), x, "amax"),
    "take": lambda x, i: x[:, 0].take(i),
    "put": lambda x, i: x[:, 0].put(i, x[0, : len(i)]),
    "cross_entropy": lambda x, i: F.cross_entropy(x.T[: len(i)], i),
    "nll_loss2d": lambda x, i: F.nll_loss(x.T.reshape(1, 4, 3)[:, :3, : len(i)], i[None]),
}
FROM_THE_END = ("index", "assignment", "index_put", "index_fill", "take", "put")


@pytest.mark.parametrize("name", CALLS)
def test_an_index_out_of_range_raises_what_the_cpu_raises(name: str) -> None:
    call = CALLS[name]
    on_xla = TABLE.to("xla")
    bad = [whole(0, 3)] + ([whole(-4, 1)] if name in FROM_THE_END else [whole(1, -1)])
    for index in bad:
        with pytest.raises((IndexError, RuntimeError)) as expected:
            call(TABLE, index)
        with pytest.raises(IndexError) as found:
            call(on_xla, index.to("xla"))
            torch_xla.sync()
        assert isinstance(found.value, expected.type)
        text = str(found.value)
        assert "of size 3" in text and f"called at {__file__}:" in text
        assert f"given index {3 if index[1] == 3 else index.min().item()} for" in text


@pytest.mark.parametrize("name", CALLS)
def test_indices_in_range_are_left_alone(name: str) -> None:
    call = CALLS[name]
    good = [whole(2, 0)] + ([whole(-3, -1)] if name in FROM_THE_END else [])
    for index in good:
        found = call(TABLE.to("xla"), index.to("xla"))
        torch_xla.sync()
        torch.testing.assert_close(found.cpu(), call(TABLE, index))


def test_the_message_names_the_line_and_the_operator() -> None:
    x = TABLE.to("xla")
    row = F.embedding(torch.tensor([7], device="xla"), x)
    line = sys._getframe().f_lineno - 1
    with pytest.raises(IndexError) as found:
        row.cpu()
    assert str(found.value) == (
        f"index out of range in self (aten::embedding, called at {__file__}:{line}, was given index 7 for "
        "dimension 0 of size 3)"
    )
    assert x.sum().item() == 66  # the next step runs


@pytest.mark.filterwarnings("ignore:aten..nonzero has no XLA lowering")  # a mask's count is data
def test_ignored_targets_masks_and_empty_indices_are_in_range() -> None:
    x = TABLE.to("xla")
    F.cross_entropy(x, torch.tensor([0, -100, 3], device="xla"))
    F.cross_entropy(x, torch.tensor([0, 9, 3], device="xla"), ignore_index=9)
    assert x[torch.zeros(0, dtype=torch.int64, device="xla")].shape == (0, 4)
    assert x[x > 9].tolist() == [10.0, 11.0]
    torch_xla.sync()


def test_an_index_tensor_on_the_host_is_checked_at_once() -> None:
    with pytest.raises(IndexError, match="index 7 is out of bounds for dimension 0 with size 3"):
        TABLE.to("xla")[whole(7)]


def test_gradients_are_those_without_checking() -> None:
    weight = TABLE.to("xla").requires_grad_()
    F.embedding(whole(0, 2, 2).to("xla"), weight).sum().backward()
    assert weight.grad is not None and weight.grad.sum(1).tolist() == [4.0, 0.0, 8.0]


def test_compiled_functions_are_checked() -> None:
    def look_up(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return F.embedding(i, x) + 1

    wrapped: list[Any] = [
        torch.compile(look_up, backend="openxla"),
        torch_xla.compile(look_up, full_graph=True),
    ]
    for compiled in wrapped:
        good = compiled(TABLE.to("xla"), whole(2).to("xla"))
        assert good.tolist() == [[9.0, 10.0, 11.0, 12.0]]
        with pytest.raises(IndexError, match=r"given index 5.*") as found:
            compiled(TABLE.to("xla"), whole(5).to("xla"))
            torch_xla.sync()
        assert Path(__file__).name in str(found.value)


def test_eager_mode_raises_at_the_operator() -> None:
    x, index = TABLE.to("xla"), whole(5).to("xla")
    with experimental.eager_mode_context(True), pytest.raises(IndexError, match="given index 5"):
        x[index]


def test_off_nothing_is_recorded_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_CHECK_INDICES")
    script = """
import torch, torch_xla
from xla_core.execution import index_checks
from xla_core.recording.entry import operations_of
row = torch.nn.functional.embedding(torch.tensor([7], device="xla"), torch.ones(3, 4, device="xla"))
trace = row._s.trace
print(operations_of(trace.cur.path())[-1].plan.name, len(index_checks.pending))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "aten.embedding.default 0", done.stderr
