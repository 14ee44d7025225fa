"""The ring of what a process did last: what goes in, that it stays bounded, and what steps usually take."""

from __future__ import annotations

import threading

import pytest
import torch

import torch_xla
from xla_core.support import flight_ring


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes when it is told to, and steps that begin anew."""

    class Clock:
        now = 0

        def __call__(self):
            return self.now

        def go(self, seconds):
            self.now += int(seconds * 1e9)

    made = Clock()
    monkeypatch.setattr(flight_ring, "perf_counter_ns", made)
    flight_ring._ends.clear()
    yield made
    flight_ring._ends.clear()


def _kinds(records):
    return [record[0] for record in records]


def test_a_step_leaves_its_transfers_programs_and_waits():
    flight_ring._ring.clear()
    x = torch.arange(7.0).to("xla")
    y = (x + x).sin()
    torch_xla.sync(wait=True)
    y.cpu()
    kinds = _kinds(flight_ring.records())
    assert [k for k in kinds if k != "compile"] == ["send", "launch", "wait", "step", "fetch"]
    send, *_, fetch = flight_ring.records()
    assert (str(send[4][0]), tuple(send[4][1]), send[5]) == ("float32", (7,), 28)
    assert (str(fetch[4][0]), tuple(fetch[4][1]), fetch[5]) == ("float32", (7,), 28)
    assert all(record[2] >= 0 for record in flight_ring.records())  # all has ended
    assert {record[3] for record in flight_ring.records()} == {threading.get_ident()}


def test_nothing_is_recorded_per_operator():
    x = torch.ones(5, device="xla")
    for count in (3, 30):
        flight_ring._ring.clear()
        for _ in range(count):
            x = x + 1
        torch_xla.sync()
        assert _kinds(flight_ring.records()).count("launch") == 1
        assert len(flight_ring.records()) <= 4


def test_a_failed_compilation_has_ended(monkeypatch):
    class Refused(RuntimeError):
        pass

    def refuse(*_arguments):
        raise Refused

    flight_ring._ring.clear()
    monkeypatch.setattr("xla_core.compilation.build_program.Compilation.look_up", refuse)
    x = torch.ones(11, device="xla") * 2.5
    with pytest.raises(Refused):
        x.cpu()
    (record,) = [r for r in flight_ring.records() if r[0] == "compile"]
    assert record[2] >= 0


def test_the_ring_is_bounded():
    for i in range(flight_ring.SLOTS + 10):
        flight_ring.note(flight_ring.WAIT, i)
    records = flight_ring.records()
    assert len(records) == flight_ring.SLOTS
    assert [r[4] for r in records][:: flight_ring.SLOTS - 1] == [10, flight_ring.SLOTS + 9]
    assert flight_ring.newest() == records[-1]


def test_what_is_usual_is_learned_from_steps_that_compile_nothing(clock):
    for seconds in (0.1, 1.0, *[0.1] * flight_ring.LEAST_STEPS):
        compiling = flight_ring.begin(flight_ring.COMPILE, "step")
        clock.go(0.9 if seconds == 1.0 else 0.0)
        flight_ring.end(compiling)
        waiting = flight_ring.begin(flight_ring.WAIT, None)
        clock.go(0.06)
        flight_ring.waited(waiting)
        clock.go(0.04)
        assert flight_ring.step_times().usual is None
        flight_ring.step()
    clock.go(7)
    times = flight_ring.step_times()
    assert times.usual == pytest.approx(0.1)
    assert times.own == pytest.approx(0.04)
    assert times.since == pytest.approx(7)
