"""Every environment variable of debugging shows its effect, in a process that begins with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

SCRIPT = """
import torch, torch_xla
from torch import nn
from xla_core.support import counters
from xla_core.extension_api.programs import all_programs
from xla_core.extension_api import runtime

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(size):
    x = torch.ones(size, 4).to("xla")
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    return loss

for size in (6, 6, 6, 5):
    loss = step(size)
waits = counters.all_metrics()
print("LOSS", loss.item())
torch.linalg.ldl_factor(torch.eye(2).to("xla"))
print("HLO", "source_line" in __import__("xla_debug.steps.graphs").steps.graphs.graph_as_hlo(
    all_programs()[0].program.stablehlo))
"""


def run(tmp_path, script=SCRIPT, **environment):
    path = tmp_path / "train.py"
    path.write_text(script)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "PT_XLA"))}
    done = subprocess.run(
        [sys.executable, str(path)],
        env={**clean, "PJRT_DEVICE": "CPU", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done


def line_of(text):
    return SCRIPT.split("\n").index(text) + 1


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """One run with all of them."""
    folder = tmp_path_factory.mktemp("everything")
    done = run(
        folder,
        PT_XLA_DEBUG="1",
        PT_XLA_DEBUG_FILE=str(folder / "debug.txt"),
        PT_XLA_DEBUG_MAX_FRAME="2",
        XLA_IR_DEBUG="1",
        XLA_HLO_DEBUG="1",
        XLA_SAVE_TENSORS_FILE=str(folder / "graphs"),
        XLA_METRICS_FILE=str(folder / "metrics.txt"),
        XLA_SYNC_WAIT="1",
    )
    return folder, done


def test_metrics_file(everything):
    text = (everything[0] / "metrics.txt").read_text()
    records = re.split(r"\[MetricsData; step=(\d+)\]\n", text)[1:]
    assert records[::2] == ["1", "2", "3", "4"]
    assert all("Metric: ExecuteTime\n" in r and r.endswith("\n\n") for r in records[1::2])
    assert [re.search(r"MarkStep\n  Value: (\d)", r)[1] for r in records[1::2]] == list("1234")


def test_debug_report(everything):
    folder, done = everything
    text = (folder / "debug.txt").read_text()
    assert "Analysis:" not in done.stderr
    start = text.index("\nCompilation Analysis: ====")
    lines = text[start + 1 :].split("\n")
    prefix = "Compilation Analysis: "
    assert lines[0] == prefix + "=" * 80
    assert lines[1] == prefix + "Compilation Cause"
    assert lines[2] == prefix + "  user torch_xla.sync"
    assert lines[3] == prefix + "Graph Info: "
    assert re.fullmatch(prefix + r"  Graph Hash: [0-9a-f]{32}", lines[4])
    assert lines[5] == prefix + "  Number of Graph Inputs: 7"
    assert re.fullmatch(prefix + r"  Number of Graph Outputs: \d+", lines[6])
    assert lines[7] == prefix + "Python Frame Triggered Execution: "
    assert re.fullmatch(prefix + r"  sync \(.*\.py:\d+\)", lines[8])
    number = line_of("    torch_xla.sync()")
    assert lines[9] == f"{prefix}  step ({folder / 'train.py'}:{number})"
    assert lines[10] == prefix + "  .........."
    assert lines[11:13] == [prefix + "-" * 80, prefix + "=" * 80]
    assert re.search(r"^Computation hash: [0-9a-f]{32}$", text, re.M)
    sizes = re.findall(r"^Post Compilation Analysis: (\w[\w ]+): \d+\.\d{6} GB$", text, re.M)
    assert sizes[:5] == [
        "Graph input size", "Graph output size", "Aliased Input size", "Intermediate tensor size",
        "Compiled program size",
    ]  # fmt: skip
    assert "\nExecution Analysis:   Number of Graph Inputs: 7\n" in text
    # PT_XLA_DEBUG=1 reports executions too: four steps
    causes = re.findall(r"^Execution Analysis: Execution Cause\n.*  (.*)$", text, re.M)
    assert causes[:4] == ["user torch_xla.sync"] * 4


def test_the_report_says_why(everything):
    folder, _ = everything
    text = (folder / "debug.txt").read_text()
    assert "Why Compiled:" in text and "dimension 0 went from 6 to 5" in text
    number = line_of("    loss = model(x).square().mean()")
    assert f"Why Compiled:   {folder / 'train.py'}:{number} in step: loss = model(x)" in text


def test_habits_are_told_on_stdout(everything):
    assert "pt-xla-profiler: " not in everything[1].stderr.split("WARNING")[0]


def test_fallbacks_are_told_at_exit(everything):
    folder, done = everything
    lines = done.stderr.split("\n")
    start = lines.index("WARNING:pt-xla-profiler:" + "=" * 80)
    found = [line.removeprefix("WARNING:pt-xla-profiler:") for line in lines[start:]]
    assert found[1] == "Unlowered Op usage summary (more of these ops, lower performance)"
    assert found[2] == "Note: _local_scalar_dense typically indicates CPU context access"
    assert found[4:6] == ["FRAME (count=1):", 'Unlowered Op: "aten::linalg_ldl_factor_ex"']
    number = line_of('torch.linalg.ldl_factor(torch.eye(2).to("xla"))')
    assert f"  <module> ({folder / 'train.py'}:{number})" in found


def test_graphs_are_saved_with_lines(everything):
    folder, _ = everything
    text = (folder / "graphs.0").read_text()
    records = text.split("[ScheduleSyncTensorsGraph]\n")[1:]
    assert len(records) >= 4
    assert re.match(
        r"TensorsGraphInfo:\n  sync \(.*:\d+\)\n  step \(.*train\.py:\d+\)\n  <module> \(.*\)\n\n"
        r"Root Hashes: \([0-9a-f, ]+\)\n\n## BEGIN_GRAPH\nIR \{\n",
        records[0],
    )
    assert re.search(r"\}\nGraph Hash: [0-9a-f]{32}\n\n## END_GRAPH\n\n$", records[0])
    # XLA_IR_DEBUG: the innermost Python line of every operator
    assert re.search(r"aten::linear\(.*location=forward@linear\.py:\d+", records[0])
    assert records[1] == records[2]


def test_programs_carry_lines(everything):
    assert "HLO True" in everything[1].stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """One run with nothing enabled."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, run(folder)


def test_nothing_is_written_without_them(plain):
    folder, done = plain
    assert "HLO False" in done.stdout
    assert "Analysis" not in done.stderr + done.stdout
    assert "pt-xla-profiler" not in done.stderr + done.stdout
    assert [p.name for p in folder.iterdir()] == ["train.py"]


def test_levels(tmp_path):
    done = run(tmp_path, PT_XLA_DEBUG_LEVEL="1")
    assert "Compilation Cause" in done.stderr and "Execution Cause" not in done.stderr
    assert "most likely user code trying to access tensor value" not in done.stdout
    assert "pt-xla-profiler" not in done.stderr
    done = run(
        tmp_path, PT_XLA_DEBUG_LEVEL="2", XLA_METRICS_FILE="STDERR", XLA_SAVE_TENSORS_FMT="dot",
        XLA_SAVE_TENSORS_FILE=str(tmp_path / "graphs"),
    )  # fmt: skip
    assert done.stderr.count("Execution Analysis: Execution Cause") >= 4
    assert "[MetricsData; step=4]\nMetric: " in done.stderr
    assert (tmp_path / "graphs.0").read_text().count("## BEGIN_GRAPH\ndigraph G {") >= 4


IN_PROCESS = """
import os, re, sys, time
import torch, torch_xla
from xla_core.extension_api import runtime
from xla_core.contract import events
from xla_debug.live import analysis, saved_graphs
from xla_debug import recompile, settings

os.environ["XLA_SAVE_TENSORS_FILE"] = sys.argv[1] if len(sys.argv) > 1 else "dump"
x = torch.ones(4).to("xla")
for form, sign in (("hlo", "HloModule"), ("stablehlo", "stablehlo.")):
    os.environ["XLA_SAVE_TENSORS_FMT"] = form
    y = x * 3
    torch_xla.sync()
    text = open("dump.0").read()
    assert sign in text.split("## BEGIN_GRAPH")[-1], form
os.environ["XLA_SAVE_TENSORS_FMT"] = "picture"
y = x * 4
try:
    torch_xla.sync()
except ValueError as error:
    assert "XLA_SAVE_TENSORS_FMT='picture'" in str(error)
else:
    raise AssertionError("an unknown format was accepted")
os.environ["XLA_SAVE_TENSORS_FMT"] = ""
waited = []
events.subscribe(events.Waited, waited.append)
os.environ["XLA_SYNC_WAIT"] = "0"
y = x * 5
torch_xla.sync()
assert not waited
os.environ["XLA_SYNC_WAIT"] = "1"
y = x * 6
torch_xla.sync()
assert len(waited) == 1
for _ in range(12):
    (x + 1).tolist()
    torch_xla.sync()
assert any("TransferFromDeviceTime too frequent" in line for line in analysis.habits())
"""


def test_formats_and_waiting(tmp_path):
    path = tmp_path / "dump"
    script = f"import os; os.chdir({str(tmp_path)!r})\n{IN_PROCESS}"
    run(tmp_path, script, XLA_SAVE_TENSORS_FILE=str(path))
