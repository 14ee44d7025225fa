"""Programs that are compiled beside the work: what waits, in which order it runs, and what failures cost."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

import torch_xla
from torch_xla.core import xla_model as xm
from torch_xla.experimental import capture
from xla_core.compilation import compile_threads, program_table
from xla_core.contract import events
from xla_core.execution import deferred_steps, runtime
from xla_core.jax_bridge import jax_private
from xla_core.launching import launch_queue, program_launch
from xla_core.launching.launch_queue import Awaited
from xla_core.support import counters, flight_ring


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    """Every program is new, and worth a second thread, of which there are two."""
    program_table.clear()
    monkeypatch.setenv("XLA_COMPILE_THREADS", "2")
    monkeypatch.setattr(deferred_steps, "LEAST_OPERATIONS", 0)
    yield
    torch_xla.sync(wait=True)
    assert not trace().backend.queue.unsettled
    assert trace().backend.queue.untold is None


def trace():
    return runtime.trace_of(None)


class Gate:
    """The compiler, which waits at a gate while it is shut; ``inside`` is how many programs are there."""

    def __init__(self, compile_):
        self._compile = compile_
        self._open = threading.Event()
        self._changed = threading.Condition()
        self.inside = self.most = 0

    def __call__(self, program):
        self._count(1)
        assert self._open.wait(60)
        try:
            return self._compile(program)
        finally:
            self._count(-1)

    def _count(self, by):
        with self._changed:
            self.inside += by
            self.most = max(self.most, self.inside)
            self._changed.notify_all()

    def wait_for(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: self.inside >= count, 60)

    def open(self):
        self._open.set()


@pytest.fixture
def gate(monkeypatch):
    weights = torch.ones(3, device="xla")  # the client runs, and what is pending is not this test's
    torch_xla.sync(wait=True)
    del weights
    made = Gate(runtime.client().compile)
    monkeypatch.setattr(runtime.client(), "compile", made)
    yield made
    made.open()


def refusing(gate, text, message="UNIMPLEMENTED: not on this device"):
    """Let the compiler behind ``gate`` refuse programs that contain ``text``."""
    compile_ = gate._compile

    def refuse(program):
        if text in jax_private.module_text(program.stablehlo):
            raise RuntimeError(message)
        return compile_(program)

    gate._compile = refuse


def test_sync_returns_while_its_program_is_compiled_and_recording_goes_on(gate):
    x = torch.arange(4.0).to("xla")
    y = x * 2.5 + 1
    torch_xla.sync()
    gate.wait_for(1)
    assert type(y._s.buffer) is Awaited
    z = y.exp().sum()  # a step that needs what is not there yet
    torch_xla.sync()
    gate.open()
    expected = (torch.arange(4.0) * 2.5 + 1).exp().sum()
    torch.testing.assert_close(z.cpu(), expected)
    assert y.tolist() == [1, 3.5, 6, 8.5]
    assert type(y._s.buffer) is not Awaited and type(z._s.buffer) is not Awaited


def test_programs_of_steps_that_need_each_other_are_compiled_at_once(gate):
    x = torch.arange(5.0).to("xla")
    y = x * 3.5
    torch_xla.sync()
    z = y.sin() + x
    torch_xla.sync()
    gate.wait_for(2)
    gate.open()
    torch.testing.assert_close(z.cpu(), (torch.arange(5.0) * 3.5).sin() + torch.arange(5.0))
    assert gate.most == 2


def test_as_many_at_once_as_the_environment_says(gate, monkeypatch):
    monkeypatch.setenv("XLA_COMPILE_THREADS", "0")
    gate.open()
    y = torch.ones(6, device="xla") * 4.5
    torch_xla.sync()
    assert type(y._s.buffer) is not Awaited
    assert compile_threads.wanted() == 0


def test_small_programs_are_compiled_at_once(gate, monkeypatch):
    monkeypatch.setattr(deferred_steps, "LEAST_OPERATIONS", 64)
    gate.open()
    y = torch.ones(7, device="xla") * 5.5
    torch_xla.sync()
    assert type(y._s.buffer) is not Awaited


def test_a_loop_that_waits_computes_what_it_would_and_copies_nothing(gate):
    x, momentum = torch.ones(3).to("xla"), torch.zeros(3).to("xla")
    mirror, mirrored = torch.ones(3), torch.zeros(3)
    for i in range(6):
        for a, b in ((x, momentum), (mirror, mirrored)):
            b.mul_(0.5).add_(a, alpha=1.5 + i)
            a.sub_(b, alpha=0.25)
        torch_xla.sync()
    queue = trace().backend.queue
    assert len(queue.unsettled) == 6
    gate.open()
    torch.testing.assert_close(x.cpu(), mirror)
    torch.testing.assert_close(momentum.cpu(), mirrored)
    assert not queue.unsettled
    program = program_table.all_programs()[-1]
    assert program.runs == 6 and program.donated and not program.copied_donations


def test_what_another_tensor_holds_is_not_donated(gate):
    x = torch.arange(3.0).to("xla")
    old = torch.empty_like(x).copy_(x)
    y = x * 2
    torch_xla.sync()
    kept = torch.empty_like(y).copy_(y)
    y.mul_(10)
    x.mul_(10)
    torch_xla.sync()
    y.mul_(10)
    torch_xla.sync()
    gate.open()
    assert [t.tolist() for t in (old, kept, x, y)] == [
        [0, 1, 2],
        [0, 2, 4],
        [0, 10, 20],
        [0, 200, 400],
    ]


def test_no_more_than_so_many_wait(gate):
    queue = trace().backend.queue
    x = torch.ones(3).to("xla")
    for _ in range(launch_queue.MOST_WAITING):
        x.add_(1.5)
        torch_xla.sync()
    assert len(queue.unsettled) == launch_queue.MOST_WAITING
    threading.Timer(0.2, gate.open).start()
    x.add_(1.5)
    torch_xla.sync()  # waits for the first
    assert len(queue.unsettled) <= launch_queue.MOST_WAITING
    assert x.tolist() == [1 + 1.5 * (launch_queue.MOST_WAITING + 1)] * 3


def test_a_value_that_is_there_does_not_wait_for_later_programs(gate):
    x = torch.arange(3.0).to("xla")
    y = x + 1.5
    torch_xla.sync()
    gate.open()
    y.tolist()
    gate._open.clear()
    z = y.cos() * 2.5
    torch_xla.sync()
    gate.wait_for(1)
    assert y.tolist() == [1.5, 2.5, 3.5]
    gate.open()
    torch.testing.assert_close(z.cpu(), (torch.arange(3.0) + 1.5).cos() * 2.5)


def test_counters_are_those_of_steps_that_have_run(compile_count):
    torch.ones(8, device="xla").tolist()
    programs = compile_count()
    runs = counters.all_metrics()["ExecuteTime"].total
    x = torch.ones(9, device="xla")
    for _ in range(3):
        x.mul_(1.25)
        torch_xla.sync()
    assert compile_count() == programs + 2  # the first makes the ones, too
    assert counters.all_metrics()["ExecuteTime"].total == runs + 3


def test_a_refused_program_is_told_by_the_next_sync_and_costs_what_depends_on_it(gate):
    weight, fine = torch.ones(3).to("xla"), torch.ones(2).to("xla")
    refusing(gate, "stablehlo.tan")
    gone = weight.tan()  # this line
    weight.add_(gone)
    fine.add_(1.5)
    torch_xla.sync()
    gate.open()
    later = weight * 2
    line = test_a_refused_program_is_told_by_the_next_sync_and_costs_what_depends_on_it
    place = f"test_launch_queue.py:{line.__code__.co_firstlineno + 3}"
    with pytest.raises(RuntimeError, match=rf"(?s)aten\.tan.*{place}.*not on this device"):
        torch_xla.sync(wait=True)
    assert fine.tolist() == [2.5, 2.5]
    assert weight.tolist() == [1, 1, 1]
    for lost in (gone, later):
        with pytest.raises(RuntimeError, match=r"(?s)never computed.*aten\.tan"):
            lost.tolist()
    weight.add_(1)
    torch_xla.sync()
    assert weight.tolist() == [2, 2, 2]


def test_a_refused_program_is_told_by_the_read_that_needs_it(gate):
    weight, fine = torch.ones(3).to("xla"), torch.ones(2).to("xla")
    refusing(gate, "stablehlo.tan")
    weight.add_(weight.tan())
    fine.add_(1.5)
    torch_xla.sync()
    gate.open()
    with pytest.raises(RuntimeError, match=r"(?s)aten\.tan.*not on this device"):
        weight.tolist()
    assert fine.tolist() == [2.5, 2.5]
    assert weight.tolist() == [1, 1, 1]


def test_steps_behind_one_that_fails_compute_what_does_not_need_it(gate):
    weight, fine = torch.ones(3).to("xla"), torch.ones(2).to("xla")
    refusing(gate, "stablehlo.tan")
    gone = weight.tan()
    torch_xla.sync()
    weight.add_(1)
    more = gone + weight
    torch_xla.sync()
    fine.add_(weight.sum())
    weight.add_(more)
    torch_xla.sync()
    gate.open()
    with pytest.raises(RuntimeError, match=r"(?s)aten\.tan"):
        torch_xla.sync(wait=True)
    assert weight.tolist() == [2, 2, 2]
    assert fine.tolist() == [7, 7]
    for lost in (gone, more):
        with pytest.raises(RuntimeError, match=r"(?s)never computed.*aten\.tan"):
            lost.tolist()


def test_two_steps_that_fail(gate):
    x = torch.ones(3).to("xla")
    refusing(gate, "stablehlo.tan", "UNIMPLEMENTED: a tangent")
    first = (x * 1.5).tan()
    torch_xla.sync()
    second = (x * 2.5).tan() + first
    third = (x * 3.5).tan()
    torch_xla.sync()
    gate.open()
    with pytest.raises(RuntimeError, match="a tangent"):
        torch_xla.sync(wait=True)
    for lost in (first, second, third):
        with pytest.raises(RuntimeError, match=r"(?s)never computed.*a tangent"):
            lost.tolist()
    assert x.tolist() == [1, 1, 1]


def test_a_launch_that_fails_is_told_later_and_gives_back_what_was(monkeypatch, gate):
    x = torch.ones(3).to("xla")

    def fail(*_args, **_keywords):
        raise RuntimeError("INTERNAL: the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(program_launch, "execution", lambda *_: map(fail, (1,)))
        x.add_(1.5)
        gone = x * 2
        torch_xla.sync()
        gate.open()
        with pytest.raises(RuntimeError, match="the device is gone"):
            torch_xla.sync(wait=True)
    assert x.tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match=r"never computed.*the device is gone"):
        gone.tolist()


def test_out_of_memory_names_the_lines(gate):
    weight, row = torch.ones(5).to("xla"), torch.ones(1, (1 << 22) + 8).to("xla")
    weight.add_(1)
    big = row.t() + row
    torch_xla.sync()
    gate.open()
    with pytest.raises(torch.OutOfMemoryError, match=r"(?s)RESOURCE_EXHAUSTED.*What helps"):
        torch_xla.sync(wait=True)
    assert weight.tolist() == [1] * 5
    with pytest.raises(RuntimeError, match="never computed"):
        big.tolist()


def test_an_interrupt_while_a_value_is_awaited_leaves_it_awaited(gate):
    x = torch.arange(3.0).to("xla")
    x.mul_(2.5)
    torch_xla.sync()
    gate.wait_for(1)
    # not SIGINT itself, which processes in the background may ignore
    former = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            x.tolist()
    finally:
        signal.signal(signal.SIGALRM, former)
    x.add_(1)
    gate.open()
    assert x.tolist() == [1, 3.5, 6]


def test_threads_read_what_another_one_s_step_computes(gate):
    x = torch.arange(3.0).to("xla") * 1.5
    torch_xla.sync()
    found = []
    reader = threading.Thread(target=lambda: found.append((x + 1).tolist()))
    reader.start()
    gate.open()
    reader.join(60)
    assert found == [[1, 2.5, 4]]


def test_compiled_functions_and_captured_steps_take_awaited_values(gate):
    compiled = torch.compile(lambda a: a.sin() + 1, backend="openxla")
    x = torch.arange(3.0).to("xla") * 1.5
    torch_xla.sync()
    assert type(x._s.buffer) is Awaited
    threading.Timer(0.2, gate.open).start()
    torch.testing.assert_close(compiled(x).cpu(), (torch.arange(3.0) * 1.5).sin() + 1)
    gate._open.clear()
    total = torch.zeros(3).to("xla")

    @capture.capture
    def step(a):
        total.add_(a)
        return total * 2.5

    y = x * 3.5
    torch_xla.sync()
    gate.open()
    results = [step(y) for _ in range(4)][-1]
    torch.testing.assert_close(results.cpu(), torch.arange(3.0) * 1.5 * 3.5 * 4 * 2.5)


def test_whoever_looks_at_every_run_sees_its_buffers(gate):
    gate.open()
    seen = []
    end = events.subscribe(events.ProgramExecuted, lambda e: seen.extend(map(type, e.results)))
    try:
        x = torch.arange(3.0).to("xla") * 6.5
        torch_xla.sync()
    finally:
        end()
    assert len(seen) == 1 and Awaited not in seen
    assert x.tolist() == [0, 6.5, 13]


def test_listeners_hear_of_a_program_when_it_is_there(gate):
    seen = []
    end = events.subscribe(events.ProgramCompiled, lambda e: seen.append(e.program))
    try:
        x = torch.arange(3.0).to("xla") * 7.5
        torch_xla.sync()
        assert not seen
        gate.open()
        x.tolist()
    finally:
        end()
    assert [p.compile_seconds > 0 for p in seen] == [True]


def test_replicas_wait_for_their_programs(gate, monkeypatch):
    """Processes must enqueue collectives in one order: nothing of theirs waits."""
    x = torch.arange(3.0).to("xla") * 8.5
    assert deferred_steps.may_wait(trace())
    monkeypatch.setattr(trace().backend, "replicas", (0, 1))
    assert not deferred_steps.may_wait(trace())
    monkeypatch.undo()
    gate.open()
    del x


def test_memory_figures_are_those_of_steps_that_have_run(gate):
    x = torch.ones(1 << 18).to("xla")
    torch_xla.sync(wait=True)
    before = xm.get_memory_info()["bytes_used"]
    y = x * 9.5
    torch_xla.sync()
    gate.open()
    assert xm.get_memory_info()["bytes_used"] >= before + y.nbytes


SLOW: str = """
    import time
    import torch, torch_xla
    from xla_core.execution import deferred_steps, runtime

    deferred_steps.LEAST_OPERATIONS = 0
    compile_ = runtime.client().compile

    def slow(program):
        time.sleep(0.5)
        return compile_(program)

    runtime.client().compile = slow
    x = torch.arange(3.0).to("xla") * 2.5
    torch_xla.sync()
    y = x.exp() + 1
    torch_xla.sync()
    assert trace_is_waiting()
"""
SLOW = SLOW.replace("trace_is_waiting()", "runtime.trace_of(None).backend.queue.unsettled")


def test_a_process_may_end_while_it_compiles(run_python):
    assert "done" in run_python(SLOW + "    print('done')\n", XLA_COMPILE_THREADS="2")


def test_a_process_may_fork_while_it_compiles(run_python):
    code = (
        SLOW
        + """
    import os
    child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(y.sum().item() > 3)
"""
    )
    assert "True" in run_python(code, XLA_COMPILE_THREADS="2")


def test_a_compilation_beside_the_work_is_in_the_flight_record(gate):
    def nanoseconds():
        records = [r for r in flight_ring.records() if r[0] == flight_ring.COMPILE]
        return [r[2] for r in records if r[4] == name][-1]  # other tests compile the same step

    x = torch.arange(3.0).to("xla") * 1.5
    torch_xla.sync()
    name = x._s.buffer.run.program.name
    assert nanoseconds() == flight_ring.RUNNING
    gate.open()
    assert x.tolist() == [0, 1.5, 3]
    deadline = time.monotonic() + 60
    while nanoseconds() == flight_ring.RUNNING and time.monotonic() < deadline:
        time.sleep(0.01)  # the thread is done with the program before it is with the record
    assert nanoseconds() > 0
