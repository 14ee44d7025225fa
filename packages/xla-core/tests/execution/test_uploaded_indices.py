"""Indices that were uploaded raise where they are used, without ``XLA_CHECK_INDICES``; nothing runs for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import torch_xla
from xla_core.contract import events

TABLE = torch.arange(12.0).reshape(3, 4)


def assigned(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[i] = 0
    return y


# what is done with two rows of three, or two classes of three
CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "embedding": lambda x, i: F.embedding(i, x),
    "x[i]": lambda x, i: x[i],
    "x[i] = 0": assigned,
    "index_select": lambda x, i: x.index_select(0, i),
    "index_add": lambda x, i: x.index_add(0, i, x[:2]),
    "gather": lambda x, i: x.gather(0, i.unsqueeze(1)),
    "scatter_add": lambda x, i: x.scatter_add(0, i.unsqueeze(1), x),
    "take": lambda x, i: x[:, 0].take(i),
    "cross_entropy": lambda x, i: F.cross_entropy(x.T[:2], i),
}


def raised(call: Callable[..., object], *operands: torch.Tensor) -> BaseException | None:
    try:
        call(*operands)
    except (IndexError, RuntimeError) as error:
        return error
    return None


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("index", [[0, 3], [-4, 1], [-1, 0], [2, 0]], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_uploaded_indices_raise_as_on_the_cpu(
    name: str, index: list[int], dtype: torch.dtype
) -> None:
    indices = torch.tensor(index, dtype=dtype)
    expected = raised(CALLS[name], TABLE, indices)
    found = raised(CALLS[name], TABLE.to("xla"), indices.to("xla"))
    assert (found is None) == (expected is None)
    if expected is not None:
        assert isinstance(found, type(expected))


def test_the_message_names_the_line_the_operator_and_the_index() -> None:
    with pytest.raises(IndexError) as found:
        F.embedding(torch.tensor([1, 7], device="xla"), TABLE.to("xla"))
    line = found.traceback[0].lineno + 1
    assert str(found.value) == (
        f"index out of range in self (aten::embedding, called at {__file__}:{line}, was given index 7 for "
        "dimension 0 of size 3)"
    )


def test_nothing_runs_and_the_step_goes_on() -> None:
    x, indices = TABLE.to("xla"), torch.tensor([0, 3]).to("xla")
    torch_xla.sync()
    requested: list[events.RunRequested] = []
    unsubscribe = events.subscribe(events.RunRequested, requested.append)
    try:
        y = x + 1
        with pytest.raises(IndexError, match="index 3 is out of bounds for dimension 0 with size"):
            y[indices]
        with pytest.raises(IndexError, match="given index 3"):
            x[indices] = -1.0
    finally:
        unsubscribe()
    assert not requested
    assert torch.equal(y.cpu(), TABLE + 1)
    assert torch.equal(x.cpu(), TABLE)


def test_a_view_counts_for_what_it_shows() -> None:
    x, indices = TABLE.to("xla"), torch.tensor([[0, 9], [2, -9]]).to("xla")
    assert torch.equal(x[indices[:, 0]].cpu(), TABLE[[0, 2]])
    assert torch.equal(x[indices[:1, 0].expand(3)].cpu(), TABLE[[0, 0, 0]])
    assert x[indices[2:]].shape == (0, 2, 4)
    with pytest.raises(IndexError, match="given index -9"):
        x[indices[:, 1]]
    with pytest.raises(IndexError, match="given index 9"):
        x[indices.reshape(4)[1:3]]


def test_only_the_uploaded_value_counts() -> None:
    x, indices = TABLE.to("xla"), torch.tensor([0, 9]).to("xla")
    indices.clamp_(max=2)
    assert torch.equal(x[indices].cpu(), TABLE[[0, 2]])
    torch_xla.sync()
    assert torch.equal(x[indices].cpu(), TABLE[[0, 2]])
    indices.copy_(torch.tensor([9, 9]))
    with pytest.raises(IndexError, match="given index 9"):
        x[indices]
    indices.data = torch.tensor([1, 1]).to("xla")
    assert torch.equal(x[indices].cpu(), TABLE[[1, 1]])


def test_ignored_targets_may_be_anything() -> None:
    scores = TABLE.to("xla")
    for targets, ignored in (([0, -100, 3], -100), ([0, 255, 3], 255), ([-7, -7, -7], -7)):
        cpu = F.cross_entropy(TABLE, torch.tensor(targets), ignore_index=ignored)
        loss = F.cross_entropy(scores, torch.tensor(targets).to("xla"), ignore_index=ignored)
        torch.testing.assert_close(loss.cpu(), cpu, equal_nan=True)
    with pytest.raises(IndexError, match="Target 4 is out of bounds"):
        F.cross_entropy(scores, torch.tensor([0, -100, 4]).to("xla"))


@pytest.mark.parametrize("value", ["0", "auto"])
def test_the_variable_turns_it_off(value: str) -> None:
    script = """
import torch, torch_xla
torch.ones(3, 4, device="xla")[torch.tensor([7], device="xla")]
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "XLA_CHECK_INDICES": value},
        capture_output=True,
        text=True,
    )
    assert ("IndexOutOfRangeError" in done.stderr) == (value == "auto"), done.stderr
