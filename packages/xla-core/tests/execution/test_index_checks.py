"""An index out of range is an IndexError at the call, or with ``XLA_CHECK_INDICES=1`` when the step has run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torch_xla
from torch_xla import experimental
from torch_xla.experimental.assume_pure import assume_pure
from torch_xla.experimental.fori_loop import fori_loop, while_loop
from torch_xla.experimental.gradient_accumulation import gradient_accumulation
from torch_xla.experimental.scan import scan
from xla_core.contract import events
from xla_core.testing.internals import checking_indices

TABLE = torch.arange(12.0).reshape(3, 4)


# the first call in a process says so
pytestmark = pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
# Tests of what is checked without XLA_CHECK_INDICES: nothing runs or waits for it.
UPLOADED = pytest.mark.parametrize("_checking", ["auto"], indirect=True)


@pytest.fixture(autouse=True)
def _checking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XLA_CHECK_INDICES", getattr(request, "param", "1"))
    with checking_indices():
        yield


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
    "multi_margin_loss": lambda x, i: F.multi_margin_loss(x.T[: len(i), :3], i),
    "index_reduce": lambda x, i: x.index_reduce(0, i, x[: len(i)], "amax"),
    "scatter_of_values": lambda x, i: x.clone().scatter_(0, i.unsqueeze(1), x),
    "one_hot": lambda x, i: F.one_hot(i, 3),
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
    row = F.embedding(torch.tensor([3], device="xla") + 4, x)
    line = sys._getframe().f_lineno - 1
    with pytest.raises(IndexError) as found:
        row.cpu()
    assert str(found.value) == (
        f"index out of range in self (aten::embedding, called at {__file__}:{line}, was given index 7 for "
        "dimension 0 of size 3)"
    )
    assert x.sum().item() == 66  # the next step runs


@pytest.mark.parametrize("name", CALLS)
def test_indices_that_are_there_already_raise_at_the_call(name: str) -> None:
    x, index = TABLE.to("xla"), whole(0, 3).to("xla")
    with pytest.raises(IndexError, match=r"given index 3 for .* of size 3"):
        CALLS[name](x, index)
    computed = whole(0, 2).to("xla") + 1
    CALLS[name](x, computed - 1)
    torch_xla.sync()
    torch_xla.sync()  # the indices were results of a step that has run
    assert computed.tolist() == [1, 3]
    with pytest.raises(IndexError, match=r"given index 3 for .* of size 3"):
        CALLS[name](x, computed)


def test_a_write_that_raises_at_the_call_has_written_nothing() -> None:
    x = TABLE.to("xla")
    with pytest.raises(IndexError, match="given index 3"):
        x[whole(0, 3).to("xla")] = -1.0
    assert torch.equal(x.cpu(), TABLE)


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


def test_the_variable_alone_turns_it_on(run_python: Callable[..., str]) -> None:
    script = """
import torch, torch_xla
torch.nn.functional.one_hot(torch.tensor([7], device="xla"), 3)
torch_xla.sync()
"""
    error = run_python(script, fails=True, XLA_CHECK_INDICES="1")
    assert "Class values must be smaller than num_classes. (aten::one_hot" in error


def test_off_nothing_is_recorded_for_it(run_python: Callable[..., str]) -> None:
    script = """
import torch, torch_xla
from xla_core.execution import index_checks
from xla_core.recording.entry import operations_of
computed = torch.tensor([7], device="xla") + 1
row = torch.nn.functional.embedding(computed, torch.ones(3, 4, device="xla"))
trace = row._s.trace
print(operations_of(trace.cur.path())[-1].plan.name, len(index_checks.pending))
"""
    assert run_python(script).strip() == "aten.embedding.default 0"


def test_one_hot_counts_its_classes_itself() -> None:
    assert F.one_hot(whole(0, 2).to("xla")).tolist() == [[1, 0, 0], [0, 0, 1]]
    with pytest.raises(RuntimeError, match="non-negative") as expected:
        F.one_hot(whole(-1, 2))
    with pytest.raises(IndexError, match="non-negative") as found:
        F.one_hot(whole(-1, 2).to("xla"))
        torch_xla.sync()
    assert str(expected.value) in str(found.value)


def rows(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    """What the loops below repeat: a row is looked up, at an index that grows."""
    return F.embedding(i, x)  # the line that errors name


ROWS_LINE = rows.__code__.co_firstlineno + 2


def in_while_loop(x: torch.Tensor, start: torch.Tensor, steps: int) -> torch.Tensor:
    def body(n: Any, i: Any, total: Any) -> Any:
        return n - 1, i + 1, total + rows(x, i)

    left = torch.tensor(steps, device="xla")
    return while_loop(lambda n, i, total: n > 0, body, (left, start, x[0] * 0))[2]


def in_condition(x: torch.Tensor, start: torch.Tensor, steps: int) -> torch.Tensor:
    last = start + steps

    def condition(i: Any, total: Any) -> Any:
        return (rows(x, i).sum() >= 0) & (i < last - 1)

    # the last test is of an index that no iteration sees
    return while_loop(condition, lambda i, total: (i + 1, total + x[0]), (start, x[0] * 0))[1]


def in_fori_loop(x: torch.Tensor, start: torch.Tensor, steps: int) -> torch.Tensor:
    body = lambda i, total: (i + 1, total + rows(x, i))  # noqa: E731
    return fori_loop(0, steps, body, start, x[0] * 0)[2]


def in_scan(x: torch.Tensor, start: torch.Tensor, steps: int) -> torch.Tensor:
    numbers = torch.arange(steps, device="xla")
    return scan(lambda c, n: (c + rows(x, start + n), c), x[0] * 0, numbers)[0]


def in_scan_of_a_loop(x: torch.Tensor, start: torch.Tensor, steps: int) -> torch.Tensor:
    ones = torch.arange(steps, device="xla")
    return scan(lambda c, n: (c + in_while_loop(x, start + n, 1), c), x[0] * 0, ones)[0]


def in_loop_of_a_scan(x: torch.Tensor, start: torch.Tensor, steps: int) -> torch.Tensor:
    def body(i: Any, total: Any) -> Any:
        return i + 1, total + in_scan(x, i, 1)

    return fori_loop(0, steps, body, start, x[0] * 0)[2]


def in_assume_pure(x: torch.Tensor, start: torch.Tensor, steps: int) -> torch.Tensor:
    total = x[0] * 0
    for _ in range(2):  # the second call is of what the first recorded
        total = _PURE(x, start + torch.arange(steps, device="xla"))
    return total


_PURE = assume_pure(lambda x, i: rows(x, i).sum(0))


def in_accumulation(x: torch.Tensor, start: torch.Tensor, steps: int) -> torch.Tensor:
    numbers = torch.arange(steps, device="xla")
    weight = torch.ones((), device="xla", requires_grad=True)

    def step(n: Any, total: Any) -> Any:
        found = rows(x, start + n)
        return (found * weight).sum(), total + found

    return gradient_accumulation(step, [numbers], torch.nn.Module(), x[0] * 0)[1]


def in_gradients(x: torch.Tensor, start: torch.Tensor, steps: int) -> torch.Tensor:
    numbers = torch.arange(steps, device="xla")
    weight = torch.ones((), device="xla", requires_grad=True)
    end, _ = scan(lambda c, n: (c + rows(x, start + n) * weight, c), x[0] * 0, numbers)
    end.sum().backward()
    assert weight.grad is not None
    return end.detach() * 0.5 + weight.grad * 0 + end.detach() * 0.5


BODIES = [
    in_while_loop, in_condition, in_fori_loop, in_scan, in_scan_of_a_loop, in_loop_of_a_scan,
    in_assume_pure, in_accumulation, in_gradients,
]  # fmt: skip


@pytest.mark.parametrize("looped", BODIES)
def test_indices_inside_of_loops(looped: Callable[..., torch.Tensor]) -> None:
    x = TABLE.to("xla")
    good = looped(x, torch.tensor(0, device="xla"), 3)
    torch_xla.sync()
    if looped is not in_condition:
        assert good.tolist() == TABLE.sum(0).tolist()
    for start, steps, given in ((0, 4, 3), (-1, 2, -1)):
        with pytest.raises(IndexError, match=f"given index {given} for") as found:
            looped(x, torch.tensor(start, device="xla"), steps)
            torch_xla.sync()
        assert f"called at {__file__}:{ROWS_LINE}," in str(found.value)
    assert looped(x, torch.tensor(1, device="xla"), 2).shape == (4,)
    torch_xla.sync()  # the next step is in range


def test_a_loop_that_runs_no_iteration_takes_no_index() -> None:
    x = TABLE.to("xla")
    for looped in (in_while_loop, in_fori_loop):
        assert looped(x, torch.tensor(9, device="xla"), 0).tolist() == [0.0] * 4


# -- uploaded indices, without the variable -----------------------------------------------------------


def raised(call: Callable[..., object], *operands: torch.Tensor) -> BaseException | None:
    try:
        call(*operands)
    except (IndexError, RuntimeError) as error:
        return error
    return None


@UPLOADED
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("index", [[0, 3], [-4, 1], [-1, 0], [2, 0]], ids=str)
@pytest.mark.parametrize("name", [name for name in CALLS if name != "one_hot"])
def test_uploaded_indices_raise_as_on_the_cpu(
    name: str, index: list[int], dtype: torch.dtype
) -> None:
    indices = torch.tensor(index, dtype=dtype)
    expected = raised(CALLS[name], TABLE, indices)
    found = raised(CALLS[name], TABLE.to("xla"), indices.to("xla"))
    assert (found is None) == (expected is None)
    if expected is not None:
        assert isinstance(found, type(expected))


@UPLOADED
def test_the_message_names_the_line_the_operator_and_the_index() -> None:
    with pytest.raises(IndexError) as found:
        F.embedding(torch.tensor([1, 7], device="xla"), TABLE.to("xla"))
    line = found.traceback[0].lineno + 1
    assert str(found.value) == (
        f"index out of range in self (aten::embedding, called at {__file__}:{line}, was given index 7 for "
        "dimension 0 of size 3)"
    )


@UPLOADED
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


@UPLOADED
def test_a_view_counts_for_what_it_shows() -> None:
    x, indices = TABLE.to("xla"), torch.tensor([[0, 9], [2, -9]]).to("xla")
    assert torch.equal(x[indices[:, 0]].cpu(), TABLE[[0, 2]])
    assert torch.equal(x[indices[:1, 0].expand(3)].cpu(), TABLE[[0, 0, 0]])
    assert x[indices[2:]].shape == (0, 2, 4)
    with pytest.raises(IndexError, match="given index -9"):
        x[indices[:, 1]]
    with pytest.raises(IndexError, match="given index 9"):
        x[indices.reshape(4)[1:3]]


@UPLOADED
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


@UPLOADED
def test_ignored_targets_may_be_anything() -> None:
    scores = TABLE.to("xla")
    for targets, ignored in (([0, -100, 3], -100), ([0, 255, 3], 255), ([-7, -7, -7], -7)):
        cpu = F.cross_entropy(TABLE, torch.tensor(targets), ignore_index=ignored)
        loss = F.cross_entropy(scores, torch.tensor(targets).to("xla"), ignore_index=ignored)
        torch.testing.assert_close(loss.cpu(), cpu, equal_nan=True)
    with pytest.raises(IndexError, match="Target 4 is out of bounds"):
        F.cross_entropy(scores, torch.tensor([0, -100, 4]).to("xla"))


@pytest.mark.parametrize("value", ["0", "auto"])
def test_the_variable_turns_it_off(run_python: Callable[..., str], value: str) -> None:
    script = """
import torch, torch_xla
torch.ones(3, 4, device="xla")[torch.tensor([7], device="xla")]
"""
    checked = value == "auto"
    assert (
        "IndexOutOfRangeError" in run_python(script, fails=checked, XLA_CHECK_INDICES=value)
    ) == checked
