"""What varying shapes do where nobody has asked for them, and where they do not pay."""

from __future__ import annotations

import gc

import pytest
import torch

import torch_xla
from torch_xla.experimental import mark_dynamic
from torch_xla.experimental.capture import capture
from xla_core.execution.device_backend import DeviceBackend
from xla_core.jax_bridge.symbolic_sizes import is_symbolic
from xla_core.operators import tensor_meta
from xla_core.support import caches, counters
from xla_core.varying import families
from xla_core.varying.bound_program import BoundProgram
from xla_core.varying.padded_buffer import PADDED_ON_HOST

_LENGTHS = (8, 12, 9, 11, 7)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.delenv("XLA_VARYING_SHAPES", raising=False)
    caches.clear_all()
    counters.clear()
    yield
    caches.clear_all()


def _counted(name):
    return counters.all_counters().get(name, 0)


def _run(length, operations=70):
    x = torch.arange(3.0 * length).view(length, 3)
    wanted, y = x, x.to("xla")
    for number in range(operations):
        wanted, y = (wanted * 0.5 + number, y * 0.5 + number)
    wanted, y = wanted.sum(0), y.sum(0)
    torch_xla.sync()
    torch.testing.assert_close(y.cpu(), wanted)


def _served_and_compiled(lengths, operations=70):
    before = _counted(families.SERVED), _counted("UncachedCompile")
    for length in lengths:
        _run(length, operations)
    return _counted(families.SERVED) - before[0], _counted("UncachedCompile") - before[1]


def test_large_steps_share_a_program_from_the_fourth_length_on():
    assert _served_and_compiled(_LENGTHS[:3]) == (0, 3)
    assert _served_and_compiled(_LENGTHS[3:]) == (2, 1)


def test_the_padding_of_each_new_length_is_a_metric():
    _served_and_compiled(_LENGTHS[:3])
    assert families.PADDING not in counters.all_metrics()  # each has a program of its own
    _served_and_compiled(_LENGTHS[3:])
    _served_and_compiled(_LENGTHS)  # nothing new
    metric = counters.all_metrics()["VaryingShapesPadding"]
    # of 12 places, 11 and 7 are used
    assert [value for _, value in metric.samples] == pytest.approx([100 / 12, 500 / 12])
    assert (metric.total, metric.accumulator) == (2, pytest.approx(600 / 12))
    assert "VaryingShapesPadding" in counters.report()


@pytest.mark.usefixtures("all_objects")
def test_programs_for_several_lengths_count_among_those_that_the_process_keeps(monkeypatch):
    monkeypatch.setenv("XLA_COMPILATION_CACHE_SIZE", "4")
    for operations in range(70, 76):
        assert _served_and_compiled(_LENGTHS, operations) == (2, 4)
    gc.collect()
    alive = [each for each in gc.get_objects() if issubclass(type(each), BoundProgram)]
    assert 1 <= len(alive) <= 4
    # that of the first steps was evicted: it is made again, and serves the next lengths
    assert _served_and_compiled((10, 9, 11), 70) == (3, 1)


@pytest.mark.usefixtures("all_objects")
def test_programs_for_several_lengths_leave_no_traces_in_jaxs_caches():
    def attend(length, operations):
        x = torch.arange(3.0 * length).view(length, 3).to("xla")
        for number in range(operations):
            x = torch.softmax(torch.exp(x * 0.1), -1) + torch.where(x > number, x.sin(), x)
        return x.sum().item()

    def traces():
        gc.collect()
        return sum(type(each).__name__ == "ClosedJaxpr" for each in gc.get_objects())

    counts = []
    for operations in (40, 41):
        for length in _LENGTHS:
            attend(length, operations)
        counts.append(traces())
    assert _counted(families.PROGRAMS) == 2
    # jax keeps those of its own jitted functions for ever, and symbolic sizes never meet them again
    assert counts[0] == counts[1]
    assert not [m for m, _ in tensor_meta._interned if any(map(is_symbolic, m))]


def test_small_steps_are_left_alone():
    assert _served_and_compiled(_LENGTHS, operations=5) == (0, len(_LENGTHS))


def test_small_steps_that_grow_by_one_share_a_program_where_gradients_are_off():
    with torch.no_grad():
        assert _served_and_compiled(range(5, 9), operations=5) == (0, 4)
        assert _served_and_compiled(range(9, 30), operations=5) == (21, 1)
        # another loop of the same steps needs none at all
        assert _served_and_compiled(range(40, 50), operations=5) == (10, 0)


def test_small_steps_of_other_lengths_are_left_alone_without_gradients_too():
    lengths = (5, 6, 7, 9, 10, 11, 13, 14, 15)
    with torch.no_grad():
        assert _served_and_compiled(lengths, operations=5) == (0, len(lengths))


def test_small_steps_that_grow_are_left_alone_where_there_are_gradients():
    assert _served_and_compiled(range(5, 15), operations=5) == (0, 10)


def test_small_steps_of_many_lengths_share_a_program():
    lengths = [7 * n % 41 + 5 for n in range(1, 26)]
    assert _served_and_compiled(lengths[:16], operations=5) == (0, 16)
    served, compiled = _served_and_compiled(lengths[16:], operations=5)
    assert served == 9 and compiled <= 5
    assert _served_and_compiled(range(24, 45), operations=5)[1] <= 2


def test_small_steps_whose_sizes_have_nothing_in_common_are_looked_at_a_few_times(monkeypatch):
    searched = []
    monkeypatch.setattr(families, "fit", lambda *given: searched.append(given))
    _served_and_compiled(range(5, 30), operations=2)
    assert len(searched) == 4


def test_zero_turns_it_off_and_marks_too(monkeypatch):
    monkeypatch.setenv("XLA_VARYING_SHAPES", "0")
    assert _served_and_compiled(_LENGTHS) == (0, len(_LENGTHS))
    before = _counted(families.SERVED)
    for length in _LENGTHS:
        x = torch.ones(length, 3).to("xla")
        mark_dynamic(x, 0)
        torch.testing.assert_close(x.cos().sum().cpu(), torch.ones(length, 3).cos().sum())
    assert _counted(families.SERVED) == before


def test_two_sizes_of_which_one_grows_by_one_are_no_cache():
    before = _counted(families.SERVED)
    for height, width in ((7, 42), (8, 88), (15, 150)):
        y = x = torch.ones(height, width).to("xla")
        for number in range(40):
            y = y * 0.5 + number
        y = y.view(-1).cumsum(0)
        torch_xla.sync()
    assert y.shape == (x.numel(),)
    assert not families.kept_out() and _counted(families.SERVED) == before


def test_a_length_that_comes_often_gets_a_program_of_its_own():
    _served_and_compiled((8, 12, 9))
    assert _served_and_compiled([11] * 110) == (
        1,
        1,
    )  # 11 of at most 12: its padding is worth nothing
    assert _served_and_compiled([7] * 100) == (1, 0)
    assert _served_and_compiled([7] * 3) == (0, 1)
    assert _served_and_compiled((7, 10)) == (1, 0)


def test_there_is_no_bound_program_where_there_is_no_room(monkeypatch):
    _served_and_compiled(_LENGTHS[:3])
    monkeypatch.setattr(DeviceBackend, "has_room", lambda self, nbytes: False)
    served, compiled = _served_and_compiled((11, 7))
    assert served == 0
    assert compiled >= 2


def test_what_is_replayed_has_no_padding():
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(20)).to("xla")

    def step(x):
        for layer in layers:
            x = x + layer(x).tanh()
        return x.cumsum(0)

    wanted = {length: step(torch.ones(length, 4).to("xla")).detach().cpu() for length in _LENGTHS}
    assert _counted(families.SERVED)
    replayed = {
        "captured": capture(step),
        "compiled": torch.compile(step, backend="openxla", dynamic=False),
    }
    for function in replayed.values():
        before = _counted(families.SERVED), _counted(PADDED_ON_HOST)
        for length in _LENGTHS:
            x = torch.ones(length, 4).to("xla")
            with torch.no_grad():
                for _ in range(4):
                    torch.testing.assert_close(function(x).cpu(), wanted[length])
        assert _counted(families.SERVED) - before[0] <= len(_LENGTHS)
        assert _counted(PADDED_ON_HOST) - before[1] <= len(_LENGTHS)  # of ordinary calls
