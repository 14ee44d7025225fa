"""What holds device memory: live tensors by line, the peak of a step, donations that were missed."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from torch import fx, nn

import torch_xla
from torch_xla._dynamo import dynamo_bridge
from xla_core.extension_api import runtime
from xla_debug import memory

SIZE = 256 * 1024  # bytes of a float32 tensor of 256 x 256


def line():
    return sys._getframe(1).f_lineno


@pytest.fixture(autouse=True)
def tracked():
    torch_xla.sync()
    memory.stop_tracking()
    memory._last_entries.clear()
    memory._makers_of.clear()
    memory._dead_inputs.clear()
    with memory.tracking():
        yield
    assert not memory._origins.of


def mine(number):
    return [t for t in memory.live_tensors() if t.where() == f"{__file__}:{number}"]


def test_live_tensors_by_the_line_that_made_them():
    x = torch.randn(256, 256).to("xla")
    uploaded = line() - 1
    y = x @ x
    computed = line() - 1
    view = y.t()[:3]
    torch_xla.sync()
    (found,) = mine(uploaded)
    assert (found.shape, found.dtype, found.nbytes) == ((256, 256), "float32", SIZE)
    assert (found.device, found.made_by) == ("xla:0", "uploaded")
    (found,) = mine(computed)
    assert "aten.mm" in found.made_by and found.nbytes == SIZE
    assert found.tensors == 3  # y, y.t() and its slice look at one value
    text = memory.report()
    assert f"{__file__}:{computed}" in text and "float32[256, 256] on xla:0" in text
    assert text.startswith(f"{len(memory.live_tensors())} live values, ")
    assert memory.report(limit=1).count("\n") == 2
    del view
    y = y + 1
    replaced = line() - 1
    torch_xla.sync()
    gc.collect()
    assert not mine(computed) and len(mine(replaced)) == 1
    del x, y
    gc.collect()
    assert not mine(uploaded) and not mine(replaced)


def test_parameters_keep_the_line_of_the_step_that_wrote_them():
    model = nn.Linear(256, 256, bias=False).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        model(torch.ones(2, 256).to("xla")).sum().backward()
        optimizer.step()
        stepped = line() - 1
        optimizer.zero_grad()
        torch_xla.sync()
    assert {t.nbytes for t in mine(stepped)} == {SIZE}
    assert len(mine(stepped)) == 2  # the weight and its momentum


def test_results_of_a_compiled_graph_are_not_taken_for_those_of_the_pending_step():
    x = torch.rand(256, 256).to("xla")
    torch_xla.sync()
    graph = dynamo_bridge.extract_compiled_graph(fx.symbolic_trace(lambda t: t.erf() * 2.5), [x])
    pending = (x.cosh() + 1).sin()
    result = graph(x)
    called = line() - 1
    (found,) = mine(called)
    assert (found.made_by, found.nbytes) == (memory.GRAPH, SIZE)
    assert result.shape == pending.shape


def test_a_value_from_before_is_told_as_such():
    memory.stop_tracking()
    x = torch.ones(300, 300).to("xla")
    memory.track()
    found = [t for t in memory.live_tensors() if t.shape == (300, 300)]
    assert [t.where() for t in found] == [memory.UNKNOWN]
    assert x.shape == (300, 300)


def test_the_peak_of_a_step_and_what_held_it():
    x = torch.randn(256, 256).to("xla")
    uploaded = torch.randn(256, 256).to("xla")
    big = torch.cat([x, uploaded] * 4)
    widest = line() - 1
    y = (big.sin() * 2).sum() + x.sum()
    after = line() - 1
    del big
    torch_xla.sync()
    peak = memory.step_peak()
    assert y.shape == ()
    assert peak.unfused >= 2 * SIZE + 2 * 8 * SIZE  # the inputs, and two values of eight times
    assert peak.peak >= 2 * SIZE and peak.by_use["arguments"] >= 2 * SIZE
    assert "aten.sin" in peak.at
    assert {h.where for h in peak.held[:2]} == {f"{__file__}:{widest}", f"{__file__}:{after}"}
    assert [h.nbytes for h in peak.held[:2]] == [8 * SIZE] * 2
    assert sum(h.what.startswith("input") for h in peak.held) == 2
    assert len(memory.step_peak(largest=1).held) == 1


def test_a_value_is_shown_as_what_it_is_among_the_results_of_its_operation():
    x = torch.randn(256, 256).to("xla")
    values, places = x.sort(dim=1)
    total = values.sum() + places.sum()
    del values, places
    torch_xla.sync()
    shown = {h.what.removeprefix("aten.sort ") for h in memory.step_peak().held if "sort" in h.what}
    assert total.shape == ()
    assert shown == {"float32[256, 256]", "int64[256, 256]"}


def test_the_timeline_of_a_step_has_its_peak():
    x = torch.ones(256, 256).to("xla")
    wide = x.repeat(8, 1).sin()
    y = wide.sum()
    del wide
    torch_xla.sync()
    timeline = memory.step_timeline()
    assert [text for text, _ in timeline][-2:] == ["aten.sin", "aten.sum"]
    sizes = [nbytes for _, nbytes in timeline]
    assert sizes[-2] == max(sizes) == memory.step_peak().unfused == SIZE + 2 * 8 * SIZE
    assert sizes[0] >= 2 * SIZE and sizes[-1] == SIZE + 8 * SIZE + 4  # the result is one number
    assert y.shape == ()


@pytest.mark.parametrize("function", [memory.step_peak, memory.step_timeline])
def test_a_peak_needs_a_step(function):
    with pytest.raises(RuntimeError, match=r"no program has run since memory.track\(\)"):
        function()


def test_a_donation_is_missed_because_something_holds_the_old_value():
    p = torch.ones(256, 256).to("xla")
    torch_xla.sync()
    for _ in range(3):
        p.mul_(1.5)
        torch_xla.sync()
    assert memory.missed_donations() == []  # each step wrote where the last value was
    old = []
    for _ in range(3):
        kept = torch.empty(256, 256, device="xla").copy_(p)  # the same value: no memory of its own
        old.append(kept)
        torch_xla.sync()
        p.mul_(1.5)
        torch_xla.sync()
    (missed,) = memory.missed_donations()
    assert missed.nbytes == SIZE and "float32[256, 256]" in missed.what
    # the program is the one of the steps before: three of its six runs had to copy
    assert missed.reason == memory.REASON_HELD.format(count=3, runs=6)
    assert [t[0, 0].item() for t in old] == [1.5**3, 1.5**4, 1.5**5]
    assert memory.missed_donations(least=SIZE + 1) == []


def test_a_donation_is_missed_because_the_input_is_only_read():
    for keep in (True, False):
        x = torch.ones(256, 256).to("xla")
        held = x if keep else None
        y = x * 3
        del x
        torch_xla.sync()
        assert y.shape == (256, 256)
        found = memory.missed_donations()
        assert bool(found) is not keep
        del held
    (missed,) = found
    assert missed.reason == memory.REASON_READ and "input float32[256, 256]" in missed.what
    x = torch.ones(256, 256).to("xla")
    x.mul_(3)  # what the reason proposes
    torch_xla.sync()
    assert len(memory.missed_donations()) == 1


def test_graphs_of_torch_compile_are_named():
    f = torch.compile(lambda x: x @ x, backend="openxla")
    here = line() - 1  # the function that was compiled
    x = torch.ones(256, 256).to("xla")
    f(x)
    y = f(x)
    (found,) = mine(here)
    assert found.made_by == memory.GRAPH and y.shape == (256, 256)
    torch._dynamo.reset()


def test_the_devices_memory():
    info = runtime.memory_info()
    text = memory.device_report()
    assert text.startswith("xla:0: ") and " in use, " in text and " at most" in text
    assert ("of " in text.split("at most")[1]) is (info["bytes_limit"] is not None)


def test_errors_of_memory_name_the_lines_while_tracking():
    huge = 1 << 22
    row = torch.ones(1, huge, device="xla")
    torch_xla.sync()
    kept, number = torch.full((1237, 811), 2.0, device="xla") * 3, line()
    torch_xla.sync()
    big = row.t() + row
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch_xla.sync(wait=True)
    held = str(caught.value).partition("Tensors hold ")[2]
    shown = next(each for each in held.splitlines() if "float32[1237,811]" in each)
    assert f"test_memory.py:{number} in test_errors_of_memory" in shown, held
    assert "XLA_TRACK_MEMORY" not in held
    del kept, big
