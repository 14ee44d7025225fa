"""Programs that were forgotten to make room: what is kept about them, and why they are made again."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import torch_xla
import torch_xla.runtime as xr
from xla_core.extension_api import runtime
from xla_core.extension_api.programs import all_programs
from xla_core.testing.internals import Root, count_memory_mappings
from xla_debug import memory, recompile
from xla_debug.recompile import Cause


@pytest.fixture
def keep_one(monkeypatch):
    xr.clear_computation_cache()
    recompile.clear()
    recompile._history.evicted.clear()
    monkeypatch.setenv("XLA_COMPILATION_CACHE_SIZE", "1")
    yield
    monkeypatch.delenv("XLA_COMPILATION_CACHE_SIZE")
    xr.clear_computation_cache()


def test_a_program_made_again_is_explained(keep_one):
    x = torch.ones(9).to("xla")
    for _ in range(2):
        (x + 3).tolist()
        (x.cos() * x).tolist()
    causes = [e.cause for e in recompile.explanations()]
    assert causes[:1] == [Cause.FIRST]
    assert causes[2:] == [Cause.EVICTED] * 2
    assert "XLA_COMPILATION_CACHE_SIZE" in recompile.explanations()[-1].report()
    assert recompile.explanations()[-1].filename == __file__


@pytest.mark.usefixtures("all_objects")
def test_nothing_here_keeps_an_evicted_program_or_dropped_steps(keep_one):
    with memory.tracking():
        x = torch.ones(10).to("xla")
        (x + 3).tolist()
        (program,) = all_programs()
        name, gone = program.name, weakref.ref(program)
        assert name in memory._last_entries
        del program
        (x * x).tolist()
        assert gone() is None
        assert name not in memory._last_entries
    torch_xla.sync()
    (trace,) = runtime.traces()
    root = id(trace.root)
    assert recompile._history.known
    xr.clear_computation_cache()
    gc.collect()
    assert root not in {
        id(o) for o in gc.get_objects() if type(o) is Root and o.first_child is not None
    }
    assert not recompile._history.known
    assert not memory._last_entries


@pytest.mark.skipif(count_memory_mappings() is None, reason="only Linux tells its memory mappings")
def test_clearing_frees_the_code_of_programs(monkeypatch):
    monkeypatch.setenv("XLA_COMPILE_EFFORT", "full")  # programs in several mappings each
    xr.clear_computation_cache()
    gc.collect()
    x = torch.ones(11).to("xla")
    torch_xla.sync()
    before = count_memory_mappings()
    for k in range(6):
        y = x
        for i in range(10 + k):
            y = (y * y).cos() if i % 2 else y @ y * y
        y.tolist()
    held = count_memory_mappings()
    assert held > before + 30
    assert recompile.explanations()
    del y
    xr.clear_computation_cache()
    gc.collect()
    assert count_memory_mappings() - before < (held - before) // 2


def test_history_is_bounded():
    assert recompile._history.known.maxlen == recompile.COMPARED
    assert recompile._history.explanations.maxlen == recompile.KEPT
