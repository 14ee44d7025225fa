"""Compiled programs that are not used for long are forgotten, their code with them, and made again."""

from __future__ import annotations

import gc
import types
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_xla
import torch_xla.runtime as xr
from torch_xla import stablehlo
from torch_xla._dynamo.dynamo_bridge import extract_compiled_graph
from xla_core.compilation import memory_mappings, program_table
from xla_core.contract import events
from xla_core.execution import runtime
from xla_core.recording.evictable import Table
from xla_core.support import counters

COUNT = 'lambda: open("/proc/self/maps", "rb").read().count(b"\\n")'
needs_maps = pytest.mark.skipif(
    memory_mappings.count() is None or memory_mappings.limit() is None, reason="only Linux tells"
)
# occupying more than this takes long
needs_small_limit = pytest.mark.skipif(
    (memory_mappings.limit() or 0) > 300_000,
    reason="the limit of this machine is too high to come near",
)

OCCUPY = f"""
import ctypes, time
import torch, torch_xla
from xla_core.compilation import memory_mappings
from xla_core.support import counters
count = {COUNT}
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

class Occupied:
    '''So many mappings: pages of one region, every other one not readable.'''
    def __init__(self, pages):
        self.size = pages * 4096
        self.start = libc.mmap(None, self.size, 1, 0x22, -1, 0)
        for page in range(0, pages, 2):
            assert not libc.mprotect(self.start + page * 4096, 4096, 0)
    def end(self):
        libc.munmap(self.start, self.size)

def number(k, length=12):
    y = x
    for _ in range(length):  # about three mappings each
        y = (y @ x).sum(0, keepdim=True) * 1.01 + x
    return y.expand(k + 1, 4, 4).sum()

x = torch.eye(4, device="xla")
torch_xla.sync()
"""

PAST = (
    OCCUPY
    + """
first = number(0).item()
each = count()
number(1).item()
each = count() - each
assert each > 15
left = 750
occupied = Occupied(memory_mappings.limit() - count() - left)
programs = left // each + 3
for k in range(programs):  # more than fit
    number(k).item()
assert counters.all_counters()["ProgramEvicted"] >= 3
compiled = counters.all_counters()["UncachedCompile"]
assert number(0).item() == first
assert counters.all_counters()["UncachedCompile"] == compiled + 1
occupied.end()
print("there", programs)
"""
)

FULL = (
    OCCUPY
    + """
y = number(1)
occupied = Occupied(memory_mappings.limit() - count() - 200)
time.sleep(1.0)  # no count is valid for longer
try:
    y.item()
except RuntimeError as error:
    print(type(error).__name__, "vm.max_map_count" in str(error))
occupied.end()
print(y.item() == number(1).item())
"""
)


@needs_maps
@needs_small_limit
def test_programs_past_the_limit_of_memory_mappings(run_python):
    assert run_python(PAST).splitlines()[-1].startswith("there")


def test_mappings_are_counted_for_many_programs_at_once(monkeypatch):
    """Counting 30,000 takes as long as a few small programs."""
    counts = []

    def count():
        counts.append(None)
        return 30_000

    monkeypatch.setattr(memory_mappings, "count", count)
    monkeypatch.setattr(memory_mappings, "limit", lambda: 65_530)
    for name in ("given", "left", "counted"):
        monkeypatch.setattr(program_table._Room, name, 0)  # as they were, after this
    monkeypatch.setattr(program_table, "time", types.SimpleNamespace(monotonic=lambda: 1.0))
    for _ in range(100):
        program_table.make_room(4)
    assert len(counts) == 1
    # an eighth of the room has been given away
    for _ in range(20):
        program_table.make_room(4)
    assert len(counts) == 2
    # and what others have made meanwhile is looked at again soon
    monkeypatch.setattr(program_table.time, "monotonic", lambda: 1.2)
    program_table.make_room(4)
    assert len(counts) == 3


@needs_maps
@needs_small_limit
def test_an_error_where_the_compiler_would_end_the_process(run_python):
    assert run_python(FULL).splitlines()[-2:] == ["TooManyMappingsError True", "True"]


@pytest.fixture
def keep(monkeypatch):
    """Lets the process keep so many programs; those there are forgotten first."""

    def limit(count):
        xr.clear_computation_cache()
        monkeypatch.setenv("XLA_COMPILATION_CACHE_SIZE", str(count))

    yield limit
    xr.clear_computation_cache()


def compiled():
    return counters.all_counters().get("UncachedCompile", 0)


def test_those_used_least_recently_go(keep):
    keep(2)
    x = torch.arange(5.0).to("xla")

    def made(function):
        before = compiled()
        assert function(x).tolist() == function(torch.arange(5.0)).tolist()
        return compiled() - before

    first, second, third = (lambda t: t + 2), (lambda t: t * t), (lambda t: t - t.sum())
    assert [made(f) for f in (first, second, first, third, first)] == [1, 1, 0, 1, 0]
    assert made(second) == 1
    assert [made(f) for f in (first, second)] == [0, 0]
    assert made(third) == 1
    assert xr.get_num_cached_compilation_graph() == 2


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_a_size_that_is_none_is_refused(keep, monkeypatch, text):
    monkeypatch.setenv("XLA_COMPILATION_CACHE_SIZE", text)
    with pytest.raises(ValueError, match=f"XLA_COMPILATION_CACHE_SIZE='{text}' .* at least 1"):
        (torch.ones(3).to("xla") + 1).tolist()
    monkeypatch.setenv("XLA_COMPILATION_CACHE_SIZE", "5")


def test_an_evicted_executable_is_gone(keep):
    keep(1)
    x = torch.ones(6).to("xla")
    (x + 1).tolist()
    (program,) = program_table.all_programs()
    gone = weakref.ref(program)
    del program
    (x * 3).tolist()
    assert gone() is None


def test_memory_of_evicted_programs_is_given_back(keep, monkeypatch):
    monkeypatch.setenv("XLA_VARYING_SHAPES", "0")  # each length has one program
    given, evicted = [], lambda: counters.all_counters().get("ProgramEvicted", 0)
    monkeypatch.setattr(program_table, "release_free_memory", lambda: given.append(evicted()))
    keep(1)
    x = torch.ones(3).to("xla")
    x.tolist()
    before = evicted() - program_table._Evicted.count
    for rows in range(1, 2 * program_table.GIVEN_BACK_AFTER + 3):
        assert (x + torch.ones(rows, 1).to("xla")).sum().item() == 6 * rows
    assert [each - before for each in given] == [64, 128]


def test_who_runs_a_program_keeps_it(keep):
    keep(1)
    x = torch.full((300, 300), 1e-3).to("xla")
    torch_xla.sync()
    y = x
    for _ in range(30):
        y = y @ x
    torch_xla.sync()  # enqueued, and perhaps running
    (program,) = program_table.all_programs()
    assert (x * 2).sum().item() == pytest.approx(180, rel=1e-5)
    assert program_table.all_programs() != [program]
    wanted = torch.full((300, 300), 1e-3)
    for _ in range(30):
        wanted = wanted @ torch.full((300, 300), 1e-3)
    torch.testing.assert_close(y.cpu(), wanted, rtol=1e-3, atol=0)  # 30 products of floats
    again = program.executable.execute([x._s.buffer])
    torch.testing.assert_close(
        torch.from_numpy(runtime.client().get(again[0])), wanted, rtol=1e-3, atol=0
    )


def test_training_with_one_program_at_a_time_is_the_same(keep):
    def trained(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        losses = []
        for step in range(6):
            x = torch.linspace(0, 1, 4 * (step % 2 + 2)).reshape(-1, 4).to(device)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    keep(1)
    assert trained("xla") == pytest.approx(trained("cpu"), rel=1e-4)
    assert xr.get_num_cached_compilation_graph() == 1


def test_graphs_of_dynamo_are_made_again(keep):
    keep(1)

    class Doubled(nn.Module):
        def forward(self, x):
            return x * 2 + x.sum()

    x = torch.arange(4.0).to("xla")
    graph = extract_compiled_graph(torch.fx.symbolic_trace(Doubled()), [x])
    wanted = (torch.arange(4.0) * 2 + 6).tolist()
    assert graph(x).tolist() == wanted
    (x - 7).tolist()
    before = compiled()
    (program,) = program_table.all_programs()
    assert graph(x).tolist() == wanted
    assert compiled() > before
    assert program not in program_table.all_programs()


def test_operators_run_one_by_one_are_counted_and_cleared(keep, monkeypatch):
    keep(2)
    monkeypatch.setenv("SYNC_TENSORS_OPBYOP", "1")
    monkeypatch.setenv("GET_TENSORS_OPBYOP", "1")
    x = torch.arange(7.0).to("xla")
    wanted = (torch.arange(7.0).exp() * 2 + 1).sqrt().tolist()
    for _ in range(2):
        assert ((x.exp() * 2 + 1).sqrt()).tolist() == pytest.approx(wanted, rel=1e-6)
        assert xr.get_num_cached_compilation_graph() == 2
    keep(2048)
    before = compiled()
    ((x.exp() * 2 + 1).sqrt()).tolist()
    first = compiled() - before
    ((x.exp() * 2 + 1).sqrt()).tolist()
    assert compiled() - before == first == 4
    xr.clear_computation_cache()
    ((x.exp() * 2 + 1).sqrt()).tolist()
    assert compiled() - before == 8


def test_operators_run_one_by_one_follow_the_settings(keep, monkeypatch):
    keep(100)
    monkeypatch.setenv("GET_TENSORS_OPBYOP", "1")
    x = torch.ones(3, 3).to("xla")
    before = compiled()
    (x @ x).tolist()
    torch_xla.backends.set_mat_mul_precision("highest")
    try:
        (x @ x).tolist()
    finally:
        torch_xla.backends.set_mat_mul_precision("default")
    (x @ x).tolist()
    assert compiled() - before == 2


def test_exported_programs_are_evicted_and_compiled_again(keep):
    keep(1)
    model = nn.Linear(3, 2)
    exported = torch.export.export(model, (torch.ones(1, 3),))
    function = stablehlo.exported_program_to_stablehlo(exported)
    wanted = model(torch.ones(1, 3))
    torch.testing.assert_close(function(torch.ones(1, 3)).cpu(), wanted)
    (torch.ones(4).to("xla") + 2).tolist()
    assert not next(iter(function._runners.values())).executables
    torch.testing.assert_close(function(torch.ones(1, 3)).cpu(), wanted)


def test_an_eviction_is_told(keep):
    keep(1)
    told = []
    end = events.subscribe(events.ProgramEvicted, told.append)
    try:
        x = torch.ones(11).to("xla")
        (x + 1).tolist()
        (program,) = program_table.all_programs()
        (x - 4).tolist()
    finally:
        end()
    assert [evicted.program for evicted in told] == [program]


def test_dropped_tables_are_no_concern_of_a_program():
    table = Table()
    kept = program_table.Kept(object())
    kept.keep(table, 1)
    other = program_table.Kept(object())
    other.keep(table, 2)
    other.keep(table, 1)
    kept.leave()
    assert table == {1: other, 2: other}
    gone = weakref.ref(table)
    del table
    gc.collect()
    assert gone() is None
    other.leave()


def test_the_evicted_program_is_found_in_the_persistent_cache(run_python, tmp_path):
    script = """
import torch, torch_xla
from xla_core.support import counters
x = torch.ones(4).to("xla")
for k in (0, 1, 0, 1):
    print((x + 2 if k else x * x).tolist()[0])
found = counters.all_counters()
print(found["UncachedCompile"], found["PersistentCacheHit"], found["ProgramEvicted"])
"""
    cache = str(tmp_path / "cache")
    said = run_python(script, XLA_PERSISTENT_CACHE_PATH=cache, XLA_COMPILATION_CACHE_SIZE="1")
    assert said.splitlines()[-1] == "2 2 3"
    assert Path(cache).is_dir()
