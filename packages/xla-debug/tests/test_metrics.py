"""``torch_xla.debug.metrics``: a report of a training run, line by line against the format."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.debug.metrics_compare_utils as mcu
from torch_xla.debug import metrics_saver
from xla_core.support import counters
from xla_debug.live import metrics_file

RUNTIME_METRICS = {
    "CompileTime", "ExecuteTime", "InboundData", "OutboundData",
    "TransferToDeviceTime", "TransferFromDeviceTime",
}  # fmt: skip
TIME = r"(\d{2}d)?(\d{2}h)?(\d{2}m)?(\d{2}s)?(\d{3}ms)?\d{3}\.\d{3}us"
NUMBER = r"\d+\.\d{2}"
BYTES = r"\d+\.\d{2}(B|KB|MB|GB|TB|PB)"
FULL = Path("/dev/full")
LABELS = ("1%", "5%", "10%", "20%", "50%", "80%", "90%", "95%", "99%")


@pytest.fixture(scope="module")
def report():
    torch_xla.sync()
    met.clear_all()
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(6):
        x, y = torch.randn(5, 6).to("xla"), torch.randint(3, (5,)).to("xla")
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        torch_xla.sync()
    loss.item()
    return met.metrics_report()


def unit_of(name):
    if name.endswith("Time"):
        return TIME
    return BYTES if name.endswith("Data") else NUMBER


def test_every_line_of_a_report_has_its_form(report):
    lines = report.split("\n")
    assert lines.pop() == "" and all(lines)
    seen = []
    while lines:
        head = re.fullmatch(r"(Metric|Counter): (\S+)", lines.pop(0))
        kind, name = head.groups()
        seen.append((name in counters.RUNTIME_NAMES, kind == "Counter", name))
        if kind == "Counter":
            assert re.fullmatch(r"  Value: [1-9]\d*", lines.pop(0)), name
            continue
        unit = unit_of(name)
        samples = int(re.fullmatch(r"  TotalSamples: (\d+)", lines.pop(0))[1])
        assert samples >= 1
        assert re.fullmatch(f"  Accumulator: {unit}", lines.pop(0)), name
        if samples > 1:
            assert re.fullmatch(f"  ValueRate: {unit} / second", lines.pop(0)), name
            assert re.fullmatch(r"  Rate: [0-9.]+(e[+-]\d+)? / second", lines.pop(0)), name
        values = lines.pop(0).removeprefix("  Percentiles: ").split("; ")
        assert [v.partition("=")[0] for v in values] == list(LABELS)
        assert all(re.fullmatch(f"[^=]+={unit}", v) for v in values), values
    # the tracing layer's metrics and counters, then the runtime's, each by name
    assert seen == sorted(seen)


def test_the_names_are_torch_xlas(report):
    metrics = set(re.findall(r"^Metric: (.+)$", report, re.M))
    found = set(re.findall(r"^Counter: (.+)$", report, re.M))
    assert RUNTIME_METRICS | {"TensorsGraphSize", "InputOutputAliasCount"} <= metrics
    assert {
        "MarkStep", "UncachedCompile", "CachedCompile", "CreateCompileHandles", "CreateDataHandles",
        "xla::linear", "xla::relu",
    } <= found  # fmt: skip
    assert {n for n in found if n.startswith("aten::")} <= {"aten::_local_scalar_dense"}


def test_the_counts_are_what_happened(report):
    assert "Counter: MarkStep\n  Value: 6\n" in report
    points = mcu.parse_metrics_report(report)
    # the first step makes the momentum buffers, the second is the one that repeats
    assert points["UncachedCompile__Value"] == points["CompileTime__TotalSamples"] == 2
    assert points["CachedCompile__Value"] == 4
    assert points["ExecuteTime__TotalSamples"] == 6
    assert points["xla::linear__Value"] == 12
    assert points["TransferFromDeviceTime__TotalSamples"] == 1
    assert points["InboundData__Accumulator_mb"] == 4 / (1 << 20)


def test_names_values_and_clearing():
    torch_xla.sync()
    met.clear_all()
    assert met.metrics_report() == "" and met.counter_names() == met.metric_names() == []
    assert met.counter_value("MarkStep") is None and met.metric_data("CompileTime") is None
    x = torch.ones(4).to("xla")
    for _ in range(3):
        y = x * 3 + 1
        torch_xla.sync()
    assert y.tolist() == [4.0] * 4
    assert met.counter_value("MarkStep") == 3
    assert met.counter_value("xla::mul") == 3
    assert met.counter_names() == sorted(met.counter_names())
    total, accumulator, samples = met.metric_data("ExecuteTime")
    assert total == len(samples) == 3
    assert accumulator == pytest.approx(sum(v for _, v in samples))
    times = [t for t, _ in samples]
    assert times == sorted(times) and times[0] > 1.6e9
    met.clear_counters()
    assert met.counter_names() == [] and "ExecuteTime" in met.metric_names()
    torch_xla.sync()
    assert met.counter_names() == ["MarkStep"]
    met.clear_metrics()
    assert met.metric_names() == []


def test_the_short_report_keeps_the_order_given():
    x = torch.ones(4).to("xla")
    (x * 2).tolist()
    torch_xla.sync()
    names = re.findall(r"^(?:Metric|Counter): (.+)$", met.short_metrics_report(), re.M)
    expected = ["CompileTime", "ExecuteTime", "TransferToDeviceTime", "TransferFromDeviceTime"]
    assert [n for n in names if n in RUNTIME_METRICS] == expected
    assert names[-1] == "MarkStep"
    chosen = met.short_metrics_report(["MarkStep"], ["OutboundData", "ExecuteTime"])
    names = re.findall(r"^(?:Metric|Counter): (.+)$", chosen, re.M)
    assert names == ["OutboundData", "ExecuteTime", "MarkStep"]


def test_fallbacks_are_named():
    met.clear_all()
    a = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    with pytest.warns(UserWarning, match="runs on the CPU"):
        torch.linalg.ldl_factor(a.to("xla"))
    assert met.executed_fallback_ops() == ["aten::linalg_ldl_factor_ex"]
    assert met.counter_value("aten::linalg_ldl_factor_ex") == 1
    assert torch_xla._XLAC._get_executed_fallback_ops() == ["aten::linalg_ldl_factor_ex"]


def test_percentiles_can_be_chosen(monkeypatch):
    monkeypatch.setenv("XLA_METRICS_PERCENTILES", "0.5:0.999")
    counters.sample("Own", 1.0, counters.render_number)
    assert "Percentiles: 50%=1.00; 99.9%=1.00\n" in met.short_metrics_report([], ["Own"])


def test_the_number_of_samples_kept_can_be_chosen(monkeypatch):
    monkeypatch.setenv("XLA_METRICS_SAMPLES", "3")
    for value in range(5):
        counters.sample("Few", value, counters.render_number)
    total, accumulator, samples = met.metric_data("Few")
    assert (total, accumulator) == (5, 10) and [v for _, v in samples] == [2, 3, 4]


def test_the_incremental_report_equals_the_full_one(monkeypatch):
    monkeypatch.setenv("XLA_METRICS_SAMPLES", "7")
    met.clear_all()
    stream = io.StringIO()
    file = metrics_file.MetricsFile(stream)
    for step in range(30):
        for value in range(step % 4):
            counters.sample("Mixed", (step * 37 + value * 11) % 13, counters.render_number)
        counters.sample("SomeTime", step * 1000.0)
        counters.increment("Steps")
        if step == 20:
            met.clear_metrics()
            counters.sample("SomeTime", 5.0)
        assert file.report() == counters.report()
    file.write()
    file.write()
    file.close()
    text = stream.getvalue()
    assert text == "".join(f"[MetricsData; step={n}]\n{counters.report()}\n" for n in (1, 2))


def test_steps_that_never_come_again_are_let_go(monkeypatch):
    """A file of metrics kept what the steps of a process counted, one for each new step, for ever."""
    monkeypatch.setattr(metrics_file, "MOST_TALLIES", 8)
    met.clear_all()
    file = metrics_file.MetricsFile(io.StringIO())
    for step in range(40):
        tally = counters.Tally((("Steps that go", 1), ("Adds", step)))
        for _ in range(3):
            tally.count()
        assert file.report() == counters.report()  # which adds up what was counted
    kept = [one for one in gc.get_objects() if type(one) is counters.Tally and one.times == 0]
    assert 0 < sum(one.rows[:1] == (("Steps that go", 1),) for one in kept) <= 8
    file.close()
    assert counters.all_counters()["Adds"] == 3 * sum(range(40))


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has a device that is always full")
def test_a_full_disk_ends_the_metrics_file_with_a_warning():
    with contextlib.suppress(OSError), FULL.open("w") as stream:
        file = metrics_file.MetricsFile(stream)
        file.write()
        with pytest.warns(UserWarning, match=r"cannot write to /dev/full.*Make room"):
            file.flush()
        file.write()
        file.flush()
    counters.increment("AfterThat")
    assert file.step == 1


def test_a_metrics_file_that_cannot_be_opened_is_a_warning_at_the_first_step(tmp_path):
    script = (
        "import warnings, torch, torch_xla\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    for _ in range(3):\n"
        "        x = torch.ones(2, device='xla') + 1\n"
        "        torch_xla.sync()\n"
        "print(x.tolist(), [str(one.message) for one in caught])\n"
    )
    path = tmp_path / "not there" / "metrics.txt"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "XLA_METRICS_FILE": str(path), "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
    )
    assert result.stdout.startswith("[2.0, 2.0]"), result.stderr
    assert result.stdout.count(f"XLA_METRICS_FILE: cannot write to {path}") == 1


def test_a_killed_process_has_written_its_steps(tmp_path):
    script = (
        "import os, time, torch, torch_xla\n"
        "for _ in range(3):\n"
        "    x = torch.ones(2, device='xla') + 1\n"
        "    torch_xla.sync()\n"
        "print('stepped', flush=True)\n"
        "time.sleep(60)\n"
    )
    path = tmp_path / "metrics.txt"
    job = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "XLA_METRICS_FILE": str(path), "PJRT_DEVICE": "CPU"},
        stdout=subprocess.PIPE,
    )
    try:
        assert job.stdout.readline() == b"stepped\n"
        deadline = time.monotonic() + 30
        while not (path.exists() and "step=3]" in path.read_text()):
            assert time.monotonic() < deadline, "the thread has not written"
            time.sleep(0.05)
    finally:
        job.kill()
        job.communicate()
    assert path.read_text().count("[MetricsData; step=") == 3


def test_saving_a_report(tmp_path, monkeypatch, capsys):
    counters.increment("Saved")
    metrics_saver.save_metrics(str(tmp_path / "m.txt"))
    metrics_saver.save_metrics(str(tmp_path / "m.txt"))
    assert (tmp_path / "m.txt").read_text() == 2 * f"{counters.report()}\n"
    monkeypatch.setenv("XLA_METRICS_FILE", "STDOUT")
    metrics_saver.save_metrics()
    assert "Counter: Saved" in capsys.readouterr().out


def test_reports_are_compared():
    old = "Metric: CompileTime\n  TotalSamples: 2\n  Counter: 06m09s401ms746.001us\n"
    points = mcu.parse_metrics_report(old)
    assert points == {
        "CompileTime__TotalSamples": 2,
        "CompileTime__Accumulator_sec": pytest.approx(369.401746001),
    }
    reports = [f"Counter: C\n  Value: {v}\nMetric: D\n  Accumulator: {v}.00MB\n" for v in (10, 12)]
    known = mcu.get_data_points_from_metrics_reports(reports)
    assert known == {"C__Value": [10, 12], "D__Accumulator_mb": [10, 12]}
    assert mcu.compare_metrics(known, "Counter: C\n  Value: 13\n") == ""
    text = mcu.compare_metrics(known, "Counter: C\n  Value: 14\nCounter: New\n  Value: 9\n")
    assert text.startswith("C__Value: 14 is above 13") and text.count("\n") == 1
    ignoring = {"base_blacklist": ["^C"], "base_expression": "v <= v_mean"}
    assert mcu.compare_metrics(known, "Counter: C\n  Value: 14\n", ignoring) == ""
    with pytest.raises(ValueError, match="base_expression"):
        mcu.compare_metrics(known, "", {"base_expression": "os.remove('x')"})
