"""The causes that ``PT_XLA_DEBUG`` names: each way in which something comes to run."""

from __future__ import annotations

import re

import pytest
import torch

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.profiler as xp
from xla_core.contract import events
from xla_debug.live import analysis
from xla_debug.stacks.sync_causes import SyncCause


@pytest.fixture
def reports(monkeypatch, tmp_path):
    """A function that gives the causes of compilations and executions since the last call."""
    torch_xla.sync()
    file = tmp_path / "debug.txt"
    monkeypatch.setenv("PT_XLA_DEBUG_FILE", str(file))
    monkeypatch.setenv("PT_XLA_DEBUG_LEVEL", "2")
    # what the process does by itself where the variables were set at its start
    undo = [
        events.subscribe(events.ProgramCompiled, analysis.on_compiled),
        events.subscribe(events.ProgramExecuted, analysis.on_executed),
    ]

    def causes():
        text = file.read_text() if file.exists() else ""
        file.unlink(missing_ok=True)
        return re.findall(r"^(\w+) Analysis: \w+ Cause\n\w+ Analysis:   (.+)$", text, re.M)

    yield causes
    for remove in undo:
        remove()


def both(cause):
    return [("Compilation", cause.value), ("Execution", cause.value)]


def test_every_way_has_its_cause(reports):
    x = torch.rand(4, 3).to("xla")
    y = x * 1.25 + 17
    torch_xla.sync()
    assert reports() == both(SyncCause.SYNC)
    y = x.exp2() + 18
    xm.mark_step()
    assert reports() == both(SyncCause.SYNC)
    y = x.cosh() - 19
    y.tolist()
    assert reports() == both(SyncCause.VALUE)
    with xp.StepTrace("step"):
        y = x.sinh() - 20
    assert reports() == both(SyncCause.STEP_TRACE)

    def f(a):
        return a.tanh() - 21

    y = x.asinh() - 22
    torch_xla.compile(f)(x)
    assert reports() == both(SyncCause.COMPILE_CLEAR) + both(SyncCause.COMPILE)
    assert y.shape == (4, 3)


def test_graphs_of_dynamo_have_theirs(reports):
    torch._dynamo.reset()
    f = torch.compile(lambda a: a.atan() - 23, backend="openxla")
    x = torch.rand(4, 3).to("xla")
    pending = x.erf() + 24
    f(pending)
    found = reports()
    assert found[:2] == both(SyncCause.DYNAMO_INPUTS)
    assert found[2:] == [
        ("Compilation", SyncCause.DYNAMO_COMPILE.value),
        ("Execution", SyncCause.DYNAMO_RUN.value),
    ]
    f(x)
    assert reports() == [("Execution", SyncCause.DYNAMO_RUN.value)]
    torch._dynamo.reset()


def test_an_execution_that_full_graph_forbids_is_always_reported(capsys):
    x = torch.rand(4, 3).to("xla")

    @torch_xla.compile(full_graph=True, name="whole")
    def f(a):
        b = a.log1p() * 25
        if b.sum() > 0:
            b = b + 1
        return b

    torch_xla.sync()
    with pytest.raises(RuntimeError, match="Unexpected execution happens inside"):
        f(x)
    lines = capsys.readouterr().err.split("\n")
    prefix = "Unexpected Execution Analysis: "
    assert lines[1] == prefix + "=" * 80
    assert lines[2:4] == [prefix + "Execution Cause", f"{prefix}  {SyncCause.VALUE.value}"]
    assert lines[4:6] == [prefix + "Graph Info: ", prefix + "  Graph Name: whole"]
    assert re.fullmatch(prefix + "  Graph Hash: [0-9a-f]{32}", lines[6])
    assert any(re.fullmatch(rf"{prefix}  f \(.*test_analysis\.py:\d+\)", line) for line in lines)
    assert lines[-2] == prefix + "=" * 80
    torch_xla.sync()
