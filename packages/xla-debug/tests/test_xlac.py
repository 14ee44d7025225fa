"""``_XLAC``: reports of pending tensors, and its profiler's objects."""

from __future__ import annotations

import re

import pytest
import torch

import torch_xla
from torch_xla import _XLAC


def test_pending_tensors_with_large_graphs_are_reported():
    torch_xla.sync()
    a = torch.ones(2, 3).to("xla")
    small = a + 1
    large = a
    for _ in range(6):
        large = large.tanh()
    report = _XLAC._xla_tensors_report(5, "xla:0")
    heads = re.findall(r"^Tensor: id=(\d+), shape=(.*), device=(.*), ir_nodes=(\d+)$", report, re.M)
    assert [(shape, device, count) for _, shape, device, count in heads] == [
        ("f32[2,3]{1,0}", "CPU:0", "7")
    ]
    assert report.count("aten::tanh(") == 6 and "aten::add" not in report
    both = _XLAC._xla_tensors_report(1)
    assert both.index("aten::tanh") < both.index("aten::add")  # the largest first
    assert _XLAC._xla_tensors_report(100) == ""
    assert torch.equal(small.cpu(), torch.full((2, 3), 2.0))
    assert large.sum().item() < 6


def test_scopes_reach_the_operations():
    pushed = _XLAC.profiler.ScopePusher("outer")
    with _XLAC.profiler.scope_pusher("inner"), _XLAC.profiler.TraceMe("span", step=3):
        y = torch.ones(2, device="xla").cos()
    pushed.close()
    pushed.close()  # once is enough
    z = torch.ones(2, device="xla").sin()
    _XLAC._set_ir_debug(True)
    try:
        text = _XLAC._get_xla_tensors_text([y, z])
    finally:
        _XLAC._set_ir_debug(False)
    assert re.search(r"aten::cos\(.*scope=outer/inner", text)
    assert not re.search(r"aten::sin\(.*scope=outer", text)


def test_a_session_exports_once(tmp_path):
    session = _XLAC.profiler.TslProfilerSessionWrapper()
    assert (torch.ones(3, device="xla") * 2).sum().item() == 6
    session.export(str(tmp_path))
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
    with pytest.raises(RuntimeError, match="has ended"):
        session.export(str(tmp_path))
    other = _XLAC.profiler.TslProfilerSessionWrapper()
    with _XLAC.profiler.TraceMe("a span of mine"):
        torch_xla.sync()
    assert b"a span of mine" in other.stop()


def test_servers():
    server = _XLAC.profiler.start_server(0)
    assert isinstance(server, _XLAC.profiler.ProfilerServer)
    with pytest.raises(ValueError, match="host:port"):
        _XLAC.profiler.trace("nowhere", "/tmp", options={"host_tracer_level": 1})
