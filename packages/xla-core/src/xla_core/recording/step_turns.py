"""Steps of several threads on one device: every thread has its own, and the trace holds one at a time.

The attributes of a ``Trace`` hold the step of the thread that recorded last. A thread that takes the trace's lock
and finds another thread's step there *parks* that step and installs its own. All threads share the tree of steps,
so steps that several threads repeat share a program. A pending value belongs to the step with the same epoch; a
thread that needs a value of a parked step runs that step first. What autograd's own threads record belongs to the
step of the thread that called ``backward()``.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from typing import Final, Protocol

from xla_core.recording.entry import Entry
from xla_core.recording.step_record import StepRecord, beginning
from xla_core.recording.storage import Recorder, Storage, View
from xla_core.support import indivisible
from xla_core.torch_bridge.torch_private import context_of_backward, current_backward

# If more threads than this have ended and left steps, the next new thread runs their steps.
MOST_ENDED: Final = 16

MSG_ENDED: Final = "the step that an ended thread left behind failed: {error}"


class TurnTaker(Recorder, Protocol):
    """The parts of a ``Trace`` that ``Turns`` need; ``parked`` has the steps of other threads."""

    parked: dict[int, Step]
    turns: Turns

    def step_record(self) -> StepRecord:
        """The state of the step that is being recorded."""
        ...

    def resuming(self, record: StepRecord) -> Iterator[None]:
        """For ``indivisible.do``: continue another step."""
        ...


class Owner:
    """A thread that records, and its steps by device."""

    __slots__ = ("ended", "ident", "steps")

    def __init__(self) -> None:
        self.ident = get_ident()
        self.steps: dict[TurnTaker, Step] = {}
        self.ended = False

    def end(self) -> None:
        """Note that the thread has ended, so that another one may get its number. Takes no lock."""
        self.ended = True
        for trace in self.steps:
            trace.turns.owners.discard(self)
            if trace.thread == self.ident:
                trace.thread = 0
        self.steps = {}


class _Life:
    """Ends an owner when its thread ends, which deletes this thread-local object."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def __del__(self) -> None:
        self._owner.end()


class _Here(threading.local):
    owner: Owner | None = None
    life: _Life | None = None


_here = _Here()
# The same owner for autograd's threads, to which backward() passes the context of its caller.
_caller: Final = contextvars.ContextVar[Owner | None]("xla_core_owner", default=None)


class Step:
    """A thread's step on one device: its state while parked, and its inputs that other steps have taken over.

    ``record`` is its state while it is parked, else None, because it would keep values alive.
    ``inputs`` and ``views`` have the value numbers, in the step of ``epoch``, of storages and views that
    another step now reads too.
    """

    __slots__ = ("epoch", "inputs", "owner", "record", "views")

    def __init__(self, owner: Owner | None, record: StepRecord | None = None) -> None:
        self.owner = owner
        self.record = record
        self.epoch = 0
        self.inputs: dict[int, int] = {}
        self.views: dict[int, tuple[View, int, int]] = {}

    @property
    def last(self) -> Entry:
        """The last entry of a parked step."""
        assert self.record is not None
        return self.record.cur

    @property
    def ended(self) -> bool:
        """Whether the thread has ended."""
        return self.owner is None or self.owner.ended

    def keep_for(self, epoch: int) -> None:
        """Drop inputs and views that were kept for a step with another epoch."""
        if self.epoch != epoch:
            self.inputs, self.views = {}, {}
            self.epoch = epoch


def turn_lock(trace: TurnTaker, bare: threading.RLock) -> contextlib.AbstractContextManager[object]:
    """A lock around the lock ``bare`` that also installs the step of the thread that takes it in the trace.

    It is released by the C function of ``bare``, which no exception can interrupt.
    """
    acquire, release = bare.acquire, bare.release
    once = (True,)

    def enter(_self: object) -> None:
        held: list[bool] = []
        try:
            held.extend(map(acquire, once))
            if trace.thread != get_ident():
                trace.turns.take()
        except BaseException:
            if held:
                release()
            raise

    members = {"__slots__": (), "__enter__": enter, "__exit__": bare.__exit__}
    return type("TurnLock", (), members)()


def backward_caller() -> int | None:
    """The number of the thread that called the running backward pass; None if it is not known."""
    context = context_of_backward()
    owner = context.get(_caller) if context is not None else None
    return None if owner is None else owner.ident


class Turns:
    """The steps of one device's threads. The caller of every method holds the trace's lock.

    ``active`` is the step that is in the trace's attributes, ``owners`` are the living threads that have a step
    here. ``_task`` is the number of the backward pass that recorded last, -1 for none.
    """

    def __init__(self, trace: TurnTaker) -> None:
        self._trace = trace
        self.active = Step(None)
        self.owners: set[Owner] = set()
        self._first: Owner | None = None
        self._task: int | None = None
        self._listeners: tuple[Callable[[], None], ...] = ()

    # -- whose turn it is ----------------------------------------------------------------------

    def take(self) -> None:
        """Install the step of the calling thread in the trace."""
        for listener in self._listeners:
            listener()
        trace = self._trace
        if trace.body_recorder is not None:
            return  # the body of a computation, whose recorder excludes other threads
        task = current_backward()
        if task == self._task != -1:
            return
        owner = self._owner(task)
        step = owner.steps.get(trace)
        begins = step is None
        if step is None:
            step = self._begin(owner)
        if step is not self.active:
            # if an exception comes in between, no thread may count as installed
            trace.thread = 0
            self._task = None
            self._enter(step)
        # one thread of autograd's runs the backward passes of several threads alternately
        alone = task == -1 or len(self.owners) == 1
        self._task = task
        trace.thread = get_ident() if alone else 0
        if begins and len(trace.parked) > MOST_ENDED:
            self._run_ended_quietly()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """From now on, call ``listener`` in each thread that takes its turn, before it does."""
        self._listeners = (*self._listeners, listener)

    def unsubscribe(self, listener: Callable[[], None]) -> None:
        """End this; without effect where it was not begun."""
        self._listeners = tuple(one for one in self._listeners if one != listener)

    def _owner(self, task: int) -> Owner:
        """The thread to which the recording belongs: the calling one, or the one that called ``backward()``."""
        if task != -1:
            context = context_of_backward()
            caller = context.get(_caller) if context is not None else None
            of_pass = caller or _here.owner or self._first
            if of_pass is not None and not of_pass.ended:
                return of_pass
        owner = _here.owner
        if owner is None or owner.ended:
            owner = _here.owner = Owner()
            _here.life = _Life(owner)
        if task == -1 and _caller.get() is not owner:
            _caller.set(owner)
        return owner

    def _begin(self, owner: Owner) -> Step:
        """A step for a thread that has none here; the first thread takes the existing one."""
        step = self.active
        if step.owner is None:
            step.owner = owner
        else:
            step = Step(owner, StepRecord(*beginning(self._trace.root)))
        if not self.owners:
            self._first = owner
        owner.steps[self._trace] = step
        self.owners.add(owner)
        return step

    def _enter(self, step: Step) -> None:
        """Park the trace's step, and install this one."""
        former, trace = self.active, self._trace
        if step is former:
            return
        parked = trace.parked
        work: list[Iterable[object]] = [
            indivisible.storing(former, ("record",), (trace.step_record(),))
        ]
        if trace.cur.depth:  # in an empty step no value has its epoch
            work.append(map(parked.__setitem__, (trace.epoch,), (former,)))
        record = step.record
        assert record is not None
        if not record.cur.depth and record.cur is not trace.root:  # the tree was dropped meanwhile
            record = record._replace(cur=trace.root)
        work += [
            map(parked.pop, (record.epoch,), (None,)),
            trace.resuming(record),
            indivisible.storing(step, ("record",), (None,)),
            indivisible.storing(self, ("active",), (step,)),
        ]
        indivisible.do(*work)

    def leave_to(self, step: Step) -> None:
        """Install ``step`` in the trace again, without saying which thread's step it is."""
        self._trace.thread = 0
        self._task = None
        self._enter(step)

    # -- values of other threads ---------------------------------------------------------------

    def prepare_input(self, s: Storage) -> bool:
        """Before ``s`` becomes an input: run the parked step that computes it, or take it over from that step.

        Returns whether ``s`` is already an input of this step, which another step has read since.
        """
        trace = self._trace
        other = trace.parked.get(s.epoch)
        if other is not None:
            if s.buffer is None:
                self.run(s.epoch)
            else:
                other.keep_for(s.epoch)
                other.inputs[id(s)] = s.vid  # the other step holds ``s``, so its id remains unique
                s.epoch = -1
        own = self.active
        vid = own.inputs.get(id(s)) if own.epoch == trace.epoch else None
        if vid is None or trace.inputs[trace.input_vids[vid]] is not s.buffer:
            return False
        s.vid = vid
        s.epoch = trace.epoch
        return True

    def known_view(self, v: View, s: Storage) -> int | None:
        """The number of a view in this step, if it was read here and then by another step; else None."""
        trace = self._trace
        other = trace.parked.get(v.epoch)
        if other is not None:
            other.keep_for(v.epoch)
            other.views[id(v)] = v, v.version, v.vid
            v.epoch = -1
        own = self.active
        earlier = own.views.get(id(v)) if own.epoch == trace.epoch else None
        if earlier is None or earlier[1] != s.version:
            return None
        v.vid, v.version = earlier[2], s.version
        v.epoch = trace.epoch
        return v.vid

    def run(self, epoch: int, reading: bool = False) -> None:
        """Run the parked step of ``epoch``, which belongs to another thread."""
        trace = self._trace
        with self._visiting(trace.parked[epoch]):
            # the owner's rule forbids runs that its own code causes; this one is caused by another thread
            forbidden, trace.forbidden = trace.forbidden, None
            try:
                trace.flush(trace, reading)
            finally:
                trace.forbidden = forbidden

    @contextlib.contextmanager
    def _visiting(self, step: Step) -> Iterator[None]:
        own = self.active
        try:
            try:
                self._enter(step)
                yield
            finally:
                self._enter(own)
        finally:
            self._enter(own)  # again, in case an exception interrupted the line above

    @contextlib.contextmanager
    def showing(self, s: Storage | None) -> Iterator[None]:
        """A block in which the step that computes ``s`` is installed (default: the thread's own step)."""
        step = None if s is None or s.buffer is not None else self._trace.parked.get(s.epoch)
        with contextlib.nullcontext() if step is None else self._visiting(step):
            yield

    # -- the ends of steps ---------------------------------------------------------------------

    def run_ended(self) -> None:
        """Run the steps that ended threads have left."""
        for epoch, step in list(self._trace.parked.items()):
            if step.ended:
                self.run(epoch)

    def _run_ended_quietly(self) -> None:
        # A step that fails loses its values, and reading one raises the reason: this thread is not at fault.
        for epoch, step in list(self._trace.parked.items()):
            if step.ended:
                try:
                    self.run(epoch)
                except Exception as error:
                    warnings.warn(MSG_ENDED.format(error=error), stacklevel=2)

    def run_all(self) -> None:
        """Run the pending steps of all threads."""
        trace = self._trace
        trace.flush(trace)
        for epoch in list(trace.parked):
            self.run(epoch)

    def drop_all(self) -> None:
        """Reset the steps of all threads; their pending values are never computed."""
        for step in list(self._trace.parked.values()):
            with self._visiting(step):
                self._trace.reset()
        self._trace.reset()
