"""Ten ways to cause a recompilation, each explained by the right line and cause."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_xla
from xla_core.extension_api import autograd, runtime
from xla_core.extension_api.steps import operations_of
from xla_core.support import caches
from xla_debug import recompile
from xla_debug.stacks import stack_frames
from xla_debug.steps.recompile_text import Cause

DEVICE = "xla"


def line(offset=0):
    """The number of the caller's line."""
    return sys._getframe(1).f_lineno + offset


@pytest.fixture(autouse=True)
def explained():
    torch_xla.sync()
    # steps of one test must not be the beginning of another's
    for trace in runtime.traces():
        trace.forget()
    recompile._history.known.clear()
    recompile.clear()


def last():
    return recompile.explanations()[-1]


def check(explanation, cause, number, *parts):
    assert explanation.cause is cause, explanation.report()
    assert explanation.filename == __file__, explanation.report()
    assert explanation.line == number, explanation.report()
    for part in parts:
        assert part in explanation.text, explanation.report()
    assert explanation.report().count("\n") >= 3
    assert explanation.nearest is not None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.5)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x):
        x = self.fc1(x)
        x = self.drop(F.relu(x))
        return self.fc2(x)


FORWARD = Net.forward.__code__.co_firstlineno


def train_step(model, optimizer, size=32, dtype=torch.float32):
    x = torch.randn(size, 8).to(dtype).to(DEVICE)
    y = torch.zeros(size, dtype=torch.long).to(DEVICE)
    optimizer.zero_grad()
    F.cross_entropy(model(x).float(), y).backward()
    optimizer.step()
    torch_xla.sync()


def make(optimizer=torch.optim.SGD, **options):
    model = Net().to(DEVICE)
    return model, optimizer(model.parameters(), lr=0.1, **options)


def test_the_last_batch_is_smaller():
    model, optimizer = make()
    for size in (32, 32, 32, 20):
        train_step(model, optimizer, size)
    check(
        last(), Cause.BATCH, FORWARD + 1,
        "dimension 0 went from 32 to 20", "Net/fc1", "float32[32, 8]", "aten.linear",
    )  # fmt: skip
    assert last().operations > last().position


def test_a_sequence_gets_longer():
    embedding = nn.Embedding(10, 4).to(DEVICE)
    for length in (5, 5, 7):
        tokens = torch.zeros(2, length, dtype=torch.long).to(DEVICE)
        embedding(tokens).sum(1)
        here = line(-1)
        out = embedding(tokens).sum(1)
        torch_xla.sync()
    assert out.shape == (2, 4)
    check(last(), Cause.SHAPE, here, "dimension 1 went from 5 to 7", "int64[2, 5]", "Embedding")


def test_the_advice_names_what_lets_no_size_vary(monkeypatch):
    monkeypatch.setenv("XLA_VARYING_SHAPES", "1")
    for length in (8, 12, 9):
        rows = torch.ones(length, 4).to(DEVICE)
        halves = rows.view(2, -1, 2)
        here = line(-1)
        y = halves.cumsum(1)
        torch_xla.sync()
    assert y.shape == (2, 9, 2)
    assert last().cause is Cause.BATCH
    assert "no program for several lengths can be made" in last().advice
    assert f"aten.view.default at {__file__}:{here}" in last().advice
    caches.clear_all()
    assert last().advice.endswith("From the third size on, steps share a program")
    monkeypatch.delenv("XLA_VARYING_SHAPES")
    assert last().advice.endswith("small ones do with XLA_VARYING_SHAPES=1")
    monkeypatch.setenv("XLA_VARYING_SHAPES", "0")
    assert "or pad the last batch. Without XLA_VARYING_SHAPES=0" in last().advice


def test_a_python_number_in_a_shape():
    x = torch.randn(8, 4).to(DEVICE)
    for end in (5, 5, 6):
        y = x[:end] * 2
        here = line(-1)
        torch_xla.sync()
    assert y.shape == (6, 4)
    check(last(), Cause.SIZE, here, "'end'", "from 5 to 6", "aten.slice")


def test_a_changing_constant():
    x = torch.rand(8).to(DEVICE)
    for power in (2, 2, 3):
        y = x**power
        here = line(-1)
        torch_xla.sync()
    assert y.shape == (8,)
    check(last(), Cause.CONSTANT, here, "'exponent'", "from 2 to 3", "aten.pow")


def test_a_branch():
    x = torch.rand(8).to(DEVICE)
    for flag in (False, False, True):
        y = x + x
        here = line(1)
        if flag:
            y = y.sin()
        y = y * x
        z = (y - x).exp()
        torch_xla.sync()
    assert z.shape == (8,)
    check(last(), Cause.BRANCH, here, "added before aten.mul.Tensor: aten.sin")


def test_train_and_eval():
    model, _ = make()
    x = torch.randn(4, 8).to(DEVICE)
    for training in (True, True, False):
        model.train(training)
        with torch.no_grad():
            y = model(x)
        torch_xla.sync()
    assert y.shape == (4, 4)
    check(last(), Cause.MODE, FORWARD + 2, "aten.bernoulli", "Net/drop", "no longer there")


def test_a_new_dtype():
    model, _ = make()
    model.eval()
    for dtype in (torch.int32, torch.int32, torch.int64):
        x = torch.ones(4, 8, dtype=dtype).to(DEVICE)
        z = x * 2
        here = line(-1)
        torch_xla.sync()
    assert z.dtype == torch.int64
    check(last(), Cause.DTYPE, here, "torch.int32 became torch.int64")


def test_a_print_that_syncs_early():
    x = torch.rand(8).to(DEVICE)
    for show in (False, False, True):
        y = (x + x).sin()
        z = (y * x).exp()
        if show:
            str(z)
            here = line(-1)
        w = (z - x).cos().sum() + y.sum()
        torch_xla.sync()
    assert w.shape == ()
    first, second = recompile.explanations()[-2:]
    check(first, Cause.EARLY_SYNC, here, "a value was needed here")
    check(second, Cause.EARLY_SYNC, here, "the rest of a step")


def test_a_list_that_grows():
    kept = []
    x = torch.rand(8).to(DEVICE)
    for _ in range(4):
        kept.append((x * 2).sum())
        torch_xla.sync()
        mean = torch.stack(kept).mean()
        here = line(-1)
        torch_xla.sync()
    assert mean.shape == ()
    check(last(), Cause.LIST, here, "aten.stack takes 4 tensors instead of 3")


def test_the_first_step_of_an_optimizer_differs():
    model, optimizer = make(torch.optim.Adam)
    train_step(model, optimizer)
    train_step(model, optimizer)
    number = train_step.__code__.co_firstlineno + 5
    check(last(), Cause.OPTIMIZER, number)
    count = len(recompile.explanations())
    train_step(model, optimizer)
    assert len(recompile.explanations()) == count


def test_another_optimizer_state():
    model, optimizer = make(momentum=0.9)
    for _ in range(3):
        train_step(model, optimizer)
    optimizer.state.clear()
    train_step(model, optimizer)
    number = train_step.__code__.co_firstlineno + 5
    known = [e for e in recompile.explanations() if e.cause is Cause.OPTIMIZER]
    assert known
    check(known[-1], Cause.OPTIMIZER, number)


def test_other_results_are_kept():
    x = torch.rand(8).to(DEVICE)
    held = []
    for keep in (False, False, True):
        y = x + x
        here = line(-1)
        if keep:
            held.append(y)
        z = y * 3
        del y
        torch_xla.sync()
    assert z.shape == (8,)
    check(last(), Cause.RESULTS, here, "aten.add", "is kept now")


def test_an_alternation_is_explained_once(caplog):
    x = torch.rand(8).to(DEVICE)
    for step in range(8):
        y = x.cos() if step % 2 else x.tan()
        torch_xla.sync()
    assert y.shape == (8,)
    assert len(recompile.explanations()) == 2
    assert not caplog.records


def test_a_cause_that_comes_back_is_told(caplog):
    x = torch.rand(20, 3).to(DEVICE)
    for end in range(4, 9):
        y = x[:end] + 1
        torch_xla.sync()
    assert y.shape == (8, 3)
    (record,) = [r for r in caplog.records if r.name == "xla_debug.recompile"]
    assert "Python number in a shape" in record.getMessage()
    assert "compiled 3 programs" in record.getMessage()
    assert recompile.summary()[Cause.SIZE] == 4
    assert "4 Python number in a shape" in recompile.report()


def test_a_block_that_may_not_compile():
    x = torch.rand(6).to(DEVICE)
    (x * x).tolist()
    with recompile.no_recompile():
        assert len((x * x).tolist()) == 6
        y = x * x - x
        with pytest.raises(recompile.RecompilationError, match="0 new programs") as caught:
            torch_xla.sync()
    assert caught.value.explanation.cause in (Cause.STEP_END, Cause.NEW)
    # what was recorded is still there
    assert torch.allclose(y.cpu(), x.cpu() * x.cpu() - x.cpu())
    with recompile.limit(1):
        x.erf().tolist()
        with pytest.raises(recompile.RecompilationError, match="1 new program and"):
            x.acos().tolist()
    with pytest.raises(ValueError, match="max_different_graphs"):
        with recompile.limit(-1):
            pass
    torch_xla.sync()


def test_blocks_inside_blocks_count_by_themselves():
    """Two blocks that allow the same number: the end of the inner one ends that one."""
    x = torch.rand(7).to(DEVICE)
    with recompile.limit(2):
        with recompile.limit(2):
            x.erf().tolist()
        x.cosh().tolist()
        with pytest.raises(recompile.RecompilationError, match="2 new programs and"):
            x.sinh().tolist()
    assert len(x.sinh().tolist()) == 7
    assert not recompile._history.limits


def test_backward_operations_name_the_forward_line():
    model, _ = make()
    x = torch.randn(3, 8).to(DEVICE)
    model(x).pow(4).sum().backward()
    trace = runtime.trace_of(None)
    where = [e.where for e in operations_of(trace.cur.path())]
    backward = [w for w in where if w.backward]
    scopes = {w.scope for w in backward}
    assert {"backward/Net/fc1", "backward/Net/fc2", "backward/Net/drop"} <= scopes
    lines = {w.frames[0].line for w in backward if w.scope == "backward/Net/fc2"}
    assert lines == {FORWARD + 3}
    torch_xla.sync()


def test_forward_operations_that_are_remembered_are_bounded():
    """A script whose graphs are never differentiated back gives each of its operations a number of its own."""
    cache = caches.registered()["forward operations"]
    assert cache.bound() == 65_536
    x = torch.ones(3, device="xla", requires_grad=True) * 2
    standing = autograd.next_sequence()
    where = stack_frames._forward.get(standing - 1)
    assert where is not None
    assert where.frames[0].filename == __file__
    try:
        for sequence in range(standing, standing + 2 * cache.bound()):
            stack_frames._forward.keep(sequence, where)
            assert cache.size() <= cache.bound()
        assert standing - 1 not in stack_frames._forward  # the oldest
        assert standing + 2 * cache.bound() - 1 in stack_frames._forward
    finally:
        cache.clear()
    assert x.sum().item() == 6


def test_looking_for_the_backward_call_leaves_nothing_to_the_collector():
    """A cycle through its own frame would hold what the caller's frames hold, as a model."""

    def look():
        stack_frames._backward_calls.clear()
        assert stack_frames.backward_call() == ()  # no thread has called backward()

    look()  # describes files, once
    gc.collect()
    look()
    assert gc.collect() == 0
