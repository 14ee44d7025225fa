"""The ends of steps: what runs when, closures, memory, metrics, and values that cannot be computed."""

from __future__ import annotations

import gc
import re
import threading
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import torch_xla
import torch_xla.core.xla_model as xm
from xla_core.compilation import program_table
from xla_core.support import counters


def buffer_of(x):
    return x._s.buffer


# -- sync -----------------------------------------------------------------------------------------


def heavy():
    """A tensor whose value takes the device a tenth of a second, a thousand times as long as a sync."""
    x = torch.full((700, 700), 0.01, device="xla")
    torch_xla.sync()  # what is computed from an input is not computed by the compiler
    for _ in range(8):
        x = (x @ x) * 0.05
    return x


def test_sync_returns_before_the_work_is_done():
    heavy().sum().item()  # compiles the program
    torch_xla.sync(wait=True)
    x = heavy().sum()
    torch_xla.sync()
    assert not buffer_of(x).is_ready()
    y = torch.ones(3, device="xla") + 1  # tracing goes on meanwhile
    assert not buffer_of(x).is_ready()
    xm.wait_device_ops()
    assert buffer_of(x).is_ready()
    assert y.tolist() == [2, 2, 2]


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_sync_waits_when_asked_to(how, monkeypatch):
    if how == "environment":
        monkeypatch.setenv("XLA_SYNC_WAIT", "1")
    x = heavy().sum()
    torch_xla.sync(wait=how == "argument")
    assert buffer_of(x).is_ready()


def test_nothing_runs_before_it_is_needed():
    runs = sum(p.runs for p in program_table.all_programs())
    x = torch.ones(2, device="xla") * 3
    y = x + 1
    assert x.shape == (2,) and y.dtype is torch.float32
    assert sum(p.runs for p in program_table.all_programs()) == runs
    assert y.tolist() == [4, 4]
    assert x.tolist() == [3, 3]
    assert sum(p.runs for p in program_table.all_programs()) == runs + 1


def test_a_step_without_work_runs_nothing():
    torch_xla.sync()
    runs = sum(p.runs for p in program_table.all_programs())
    steps = counters.all_counters()["MarkStep"]
    torch_xla.sync()
    xm.mark_step()
    assert sum(p.runs for p in program_table.all_programs()) == runs
    assert counters.all_counters()["MarkStep"] == steps + 2


def test_what_nobody_holds_is_not_computed():
    torch_xla.sync()
    x = torch.ones(2, device="xla")
    x.exp()
    torch_xla.sync()
    program = program_table.all_programs()[-1]
    assert len(program.output_index) == 1


def test_optimizer_step_ends_the_step_with_a_barrier_only():
    p = torch.nn.Parameter(torch.ones(1, device="xla"))
    optimizer = torch.optim.SGD([p], lr=0.5)
    p.grad = torch.ones(1, device="xla")
    torch_xla.sync()
    before = counters.all_counters()["MarkStep"]
    assert xm.optimizer_step(optimizer) is None
    assert buffer_of(p) is None
    assert xm.optimizer_step(optimizer, barrier=True, optimizer_args={"closure": lambda: 7}) == 7
    assert buffer_of(p) is not None
    assert counters.all_counters()["MarkStep"] == before + 1
    assert p.item() == 0


@pytest.mark.skipif(
    find_spec("xla_dist") is not None, reason="xla-dist is installed beside xla-core"
)
def test_groups_need_the_package_of_collectives():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1, device="xla"))], lr=0.5)
    with pytest.raises(RuntimeError, match="install xla-dist"):
        xm.optimizer_step(optimizer, groups=[[0]])


def test_a_repeating_step_is_compiled_once(compile_count):
    x = torch.zeros(3, device="xla")
    for step in range(6):
        x = x * 2 + 1
        torch_xla.sync()
        if step == 1:
            compiled = compile_count()
    assert x.tolist() == [63] * 3
    assert compile_count() == compiled


def test_other_shapes_are_other_programs_and_old_ones_stay(compile_count):
    def fives(n):
        return (torch.ones(n, device="xla") * 5).tolist()

    assert [len(fives(n)) for n in (2, 3)] == [2, 3]
    compiled = compile_count()
    assert [fives(n) for n in (3, 2, 3)] == [[5] * 3, [5] * 2, [5] * 3]
    assert compile_count() == compiled


# -- values that cannot be computed ---------------------------------------------------------------


@pytest.fixture
def broken_digamma(replace_rule):
    """An operator whose lowering rule fails."""

    def broken(*_):
        raise ValueError("no such luck")

    replace_rule(torch.ops.aten.digamma.default, lambda _function: broken)


def test_a_failed_lowering_costs_only_what_depends_on_it(broken_digamma):
    kept = torch.ones(2, device="xla")
    lost = torch.zeros(2, device="xla")
    torch_xla.sync()
    x = torch.full((2,), 3.0, device="xla")
    y = x.digamma()
    z = y + 1
    other = x * 2
    kept.mul_(5)
    lost.add_(z)
    view = lost[1]
    with pytest.raises(
        RuntimeError, match=r"lowering rule of aten\.digamma.*ValueError: no such luck"
    ):
        torch_xla.sync()
    # the device goes on
    assert (x.tolist(), other.tolist(), kept.tolist()) == ([3, 3], [6, 6], [5, 5])
    for gone in (y, z):
        for use in (gone.cpu, gone.sum, gone.exp, gone.clone):
            with pytest.raises(RuntimeError, match=r"value was never computed.*no such luck"):
                use()
    # as if the operator had failed when it was called
    assert (lost.tolist(), view.item()) == ([0, 0], 0)
    lost.fill_(4)
    assert (lost.tolist(), view.item()) == ([4, 4], 4)
    torch_xla.sync()


# -- step closures --------------------------------------------------------------------------------


def test_closures_run_at_the_end_of_the_step_with_values():
    seen = []
    loss = torch.ones(2, device="xla").sum() * 2
    xm.add_step_closure(lambda value, text: seen.append((value.item(), text)), args=(loss, "a"))
    xm.add_step_closure(lambda: seen.append("b"))
    assert seen == []
    torch_xla.sync()
    assert seen == [(4, "a"), "b"]
    torch_xla.sync()
    assert len(seen) == 2


def test_closures_run_at_every_kind_of_step_end():
    p = torch.nn.Parameter(torch.ones(1, device="xla"))
    optimizer = torch.optim.SGD([p], lr=0.5)
    seen = []
    for end in (xm.mark_step, lambda: xm.optimizer_step(optimizer, barrier=True), torch_xla.sync):
        xm.add_step_closure(seen.append, args=(1,))
        end()
    assert seen == [1, 1, 1]


def test_what_a_closure_raises_surfaces_at_the_sync():
    def fail(value):
        raise KeyError(value)

    xm.add_step_closure(fail, args=("here",))
    with pytest.raises(KeyError, match="here"):
        torch_xla.sync()
    torch_xla.sync()


def test_asynchronous_closures_run_in_order_in_a_thread_of_their_own():
    gate = threading.Event()
    done = threading.Event()
    seen = []

    def closure(value):
        gate.wait(30)
        seen.append((value.item(), threading.current_thread() is threading.main_thread()))
        if len(seen) == 3:
            done.set()

    for i in range(3):
        xm.add_step_closure(closure, args=(torch.full((), float(i), device="xla"),), run_async=True)
        torch_xla.sync()  # does not wait for the closure
    assert seen == []
    gate.set()
    assert done.wait(30)
    assert seen == [(0.0, False), (1.0, False), (2.0, False)]


def test_what_an_asynchronous_closure_raises_surfaces_at_a_later_sync():
    failed = threading.Event()

    def fail():
        failed.set()
        raise KeyError("there")

    xm.add_step_closure(fail, run_async=True)
    torch_xla.sync()
    assert failed.wait(30)
    with pytest.raises(RuntimeError, match=r"run_async=True failed: 'there'") as caught:
        for _ in range(100):  # the thread may need a moment to hand the error over
            torch_xla.sync()
            threading.Event().wait(0.05)
    assert isinstance(caught.value.__cause__, KeyError)
    torch_xla.sync()


# -- memory ---------------------------------------------------------------------------------------


def used():
    torch_xla.sync(wait=True)  # what is pending holds its inputs
    gc.collect()
    return xm.get_memory_info("xla:0")["bytes_used"]


def test_memory_info_counts_what_lives():
    info = xm.get_memory_info()
    assert set(info) == {"bytes_used", "bytes_limit", "peak_bytes_used", "kb_total", "kb_free"}
    before = used()
    x = torch.ones(1000, 256, device="xla")
    torch_xla.sync()
    assert used() == before + 1_024_000
    y = x[:10]  # a view holds the storage, and nothing more
    del x
    assert used() == before + 1_024_000
    assert xm.get_memory_info()["peak_bytes_used"] >= before + 1_024_000
    del y
    assert used() == before


def test_a_value_that_was_read_counts_once():
    x = torch.ones(1000, 256, device="xla")
    torch_xla.sync()
    before = used()
    assert x.cpu().sum() == 256_000
    assert used() == before


def test_in_place_updates_reuse_the_memory():
    x = torch.ones(1000, 256, device="xla")
    torch_xla.sync()
    before = used()
    pointer = buffer_of(x).unsafe_buffer_pointer()
    for _ in range(3):
        x.mul_(1.5).add_(1)
        torch_xla.sync()
        assert buffer_of(x).unsafe_buffer_pointer() == pointer
    assert used() == before


def test_a_buffer_that_others_hold_is_not_overwritten():
    x = torch.ones(3, device="xla")
    torch_xla.sync()
    y = x.clone()
    torch_xla.sync()
    for step in range(3):
        x.add_(1)
        torch_xla.sync()
        assert y.tolist() == [1, 1, 1]
        assert x.tolist() == [step + 2] * 3


def test_gradients_of_a_training_step_are_freed_one_after_the_other():
    """With its parameters' results in the order of the forward pass, four of the gradients lived at once."""
    layers = [part for _ in range(16) for part in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.Sequential(*layers).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(4, 256).to("xla")
    torch_xla.sync()
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    program = program_table.all_programs()[-1]
    assert program.executable.memory_analysis()["temporaries"] < 3 * 256 * 256 * 4


# -- metrics --------------------------------------------------------------------------------------

TIME = r"(\d\dd)?(\d\dh)?(\d\dm)?(\d\ds)?(\d{3}ms)?\d{3}\.\d{3}us"
BYTES = r"\d+\.\d\d(B|KB|MB|GB|TB|PB)"
VALUE = rf"({TIME}|{BYTES}|\d+\.\d\d)"
METRIC = re.compile(
    rf"Metric: \w+\n  TotalSamples: \d+\n  Accumulator: {VALUE}\n"
    rf"(  ValueRate: {VALUE} / second\n  Rate: [\d.e+-]+ / second\n)?"
    rf"  Percentiles: 1%={VALUE}; 5%={VALUE}; 10%={VALUE}; 20%={VALUE}; 50%={VALUE}; "
    rf"80%={VALUE}; 90%={VALUE}; 95%={VALUE}; 99%={VALUE}\n"
)
COUNTER = re.compile(r"Counter: [\w:.]+\n  Value: \d+\n")


def test_the_report_has_torch_xlas_format():
    (torch.ones(3, device="xla") * 2).tolist()
    torch_xla.sync()
    report = torch_xla._XLAC._xla_metrics_report()
    rest, metrics = METRIC.subn("", report)
    rest, values = COUNTER.subn("", rest)
    assert rest == ""
    assert metrics >= 5 and values >= 2
    names = re.findall(r"^Metric: (\w+)$", report, re.M)
    # the tracing layer's metrics come first, then the runtime's
    assert names == sorted(names, key=lambda name: (name in counters.RUNTIME_NAMES, name))
    assert {"CompileTime", "ExecuteTime", "TransferFromDeviceTime", "InboundData"} <= set(names)
    assert {"MarkStep", "UncachedCompile"} <= set(re.findall(r"^Counter: (\w+)$", report, re.M))


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (19_689, "019.689us"),
        (233_906_885, "233ms906.885us"),
        (0, "000.000us"),
        (1_000_000_000, "01s000ms000.000us"),
        (369_401_746_001, "06m09s401ms746.001us"),
        (90_061_000_000_001, "01d01h01m01s000ms000.001us"),
    ],
)
def test_times_as_torch_xla_prints_them(nanoseconds, text):
    assert counters.render_time(nanoseconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(24, "24.00B"), (7895, "7.71KB"), (3 << 20, "3.00MB"), (5 << 50, "5.00PB")]
)
def test_bytes_as_torch_xla_prints_them(count, text):
    assert counters.render_bytes(count) == text


def test_transfers_are_counted():
    def count(name):
        found = counters.all_metrics().get(name)
        return (found.total, found.accumulator) if found is not None else (0, 0)

    out, back = count("OutboundData"), count("InboundData")
    x = torch.ones(10, 10).to("xla")
    assert count("OutboundData") == (out[0] + 1, out[1] + 400)
    x.cpu()
    assert count("InboundData") == (back[0] + 1, back[1] + 400)


@pytest.mark.parametrize(
    ("step", "largest"),
    [
        (lambda x: x.sum(), 21),  # an input
        (lambda x: x.unsqueeze(0).expand(5, 7, 3).exp().sum(), 105),  # computed on the way
        (lambda x: x.repeat(4, 1), 84),  # a result
        (lambda x: x[:0].exp(), 21),
    ],
    ids=["input", "between", "result", "nothing"],
)
def test_the_device_is_told_how_large_a_value_the_step_works_on(step, largest):
    x = torch.ones(7, 3, device="xla")
    torch_xla.sync()
    y = step(x)
    torch_xla.sync()
    assert y.device.type == "xla"
    program = program_table.all_programs()[-1].program
    assert program is not None
    assert program.largest == largest
