"""Replays a recorded step without its Python code: one check of what could have changed, and one launch.

When a replay is made, it resolves the tensors that the program reads and writes to flat lists. Work per tensor is
done in C (``map`` over builtins).
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from sys import getrefcount
from threading import get_ident
from typing import Final

import numpy as np
from torch.autograd.graph import increment_version

from xla_core.capture import errors
from xla_core.capture.errors import refuse
from xla_core.capture.guards import Guards
from xla_core.capture.matching import Buffers, Returned, Wiring, all_arguments, check_numbers
from xla_core.capture.observation import Observation, Value
from xla_core.capture.optimizer_replay import Numbers
from xla_core.capture.references import (
    ALONE,
    PICKED,
    Constant,
    Gradients,
    Lending,
    other_input,
    picker,
)
from xla_core.compilation.staged_executable import StagedExecutable
from xla_core.contract import events
from xla_core.contract.foreign_values import ForeignObject
from xla_core.execution import deferred_steps, run_step
from xla_core.execution.device_backend import DeviceBackend
from xla_core.recording import random_state
from xla_core.recording.storage import (
    HeldBuffer,
    Storage,
    binding,
    leaving,
    poison,
    replacing,
)
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import XLATensor
from xla_core.support import counters
from xla_core.torch_bridge.operands import Operand, Tree

_BUFFER: Final = operator.attrgetter("buffer")

REPLAYED: Final = "CapturedStepReplayed"
"""Counts steps that ran without their Python code."""

_EMPTY: Final = Constant(None)


class Replay:
    """One recording of a captured function, for arguments of one kind.

    ``program`` computes the step, ``last`` is the step's last entry, ``donated`` are the slots of inputs whose
    memory the program reuses.
    """

    def __init__(
        self,
        name: str,
        trace: Trace,
        wiring: Wiring,
        former: Observation,
        latter: Observation,
        guards: Guards,
    ) -> None:
        self._name = name
        self.trace = self._trace = trace
        self._guards = guards
        self.program = latter.program
        self.last = latter.last
        if not former.drawn.known or not latter.drawn.known or former.drawn != latter.drawn:
            raise refuse(errors.MSG_RANDOM, name=name)
        self._numbers = Numbers(name, former, latter)
        check_numbers(name, former, latter, self._numbers.known, set(latter.drawn.positions))
        self._ints = np.array(latter.ints, np.int64)
        self._drawn = latter.drawn
        self._seed_positions = np.array(latter.drawn.positions, np.intp)
        self._places = np.array(latter.drawn.places, np.uint64)
        self._floats = bool(latter.floats)
        put = trace.backend.put_numbers
        # numbers that are the same in each call stay on the device, as no program donates their buffer
        self._kept_floats = (
            put(self._numbers.last) if self._floats and self._numbers.fixed else None
        )
        fixed = self._ints.size and not latter.drawn.count
        self._kept_ints = put(self._ints) if fixed else None
        self._bind_inputs(wiring)
        self._bind_results(wiring)
        # the step reads the gradients of parameters that optimizers change, and those that it adds to
        looked_at = self._numbers.parameters | set(map(id, self._states))
        self._gradients = Gradients(name, wiring, guards, looked_at)
        self._writes_arguments = bool(self._written_arguments or wiring.cleared)
        self.present = wiring.present.keys()
        touched = {id(s) for s in itertools.chain(self._states, self._targets)}
        guards.watch_optimizers(self._numbers.optimizers, touched)
        guards.leave_flags(former.flagged.keys() | latter.flagged.keys())
        guards.leave_modes(former.modes, latter.modes)
        self._bind_donated()
        self._count_own_references()
        self._blank = copy.copy(trace)
        self._mesh = type(trace.backend) is not DeviceBackend
        self._lending = Lending(trace, self._targets, self._inputs, self._arguments)
        staged = isinstance(self.program.executable, StagedExecutable)
        self._may_lend = not staged and self._keeps_to_itself()

    # -- making --------------------------------------------------------------------------------

    def _bind_inputs(self, wiring: Wiring) -> None:
        self._inputs: list[Storage | Constant] = []
        self._arguments: list[tuple[int, int]] = []
        self._states: list[Storage] = []
        for slot, one in enumerate(wiring.inputs):
            if isinstance(one, int):
                self._arguments.append((slot, one))
                self._inputs.append(_EMPTY)
            elif isinstance(one, tuple):
                self._inputs.append(Constant(one[0]))
            else:
                self._inputs.append(one)
                self._states.append(one)
        self.donated = self.program.donated
        self._state_ids = frozenset(map(id, self._states))
        numbers = dict(self._arguments)
        self._sources = [numbers.get(slot, one) for slot, one in enumerate(self._inputs)]

    def _bind_results(self, wiring: Wiring) -> None:
        index = self.program.output_index
        self._targets: list[Storage] = []
        positions = []
        self._written_arguments: list[tuple[int, Value]] = []
        self._passed: list[tuple[Storage, int]] = []
        for target, value in wiring.written:
            if isinstance(target, int):
                self._written_arguments.append((target, value))
            elif value.vid is None:
                assert value.slot is not None
                self._passed.append((target, value.slot))
            else:
                self._targets.append(target)
                positions.append(index[value.vid])
        # without gradients, which _renew_gradients replaces, so that another storage may get the id of one
        gradients = {id(one.grad._s) for one in wiring.gradients}
        self._state_ids = (self._state_ids | set(map(id, self._targets))) - gradients
        # after all others, as _renew_gradients replaces them
        for one in wiring.gradients:
            if one.value.vid is None:
                raise refuse(errors.MSG_KEPT, name=self._name, meta=one.grad._s.meta)
            self._targets.append(one.grad._s)
            positions.append(index[one.value.vid])
        self._positions = positions
        self._pick_results = picker(positions)
        staged = isinstance(self.program.executable, StagedExecutable)
        # a result that a tensor keeps; when it is computed, all results of the program are
        self._watched = None if staged or not wiring.written or not positions else positions[0]
        self._returned = Returned(self._trace, wiring, index)
        changed = {id(s) for s in self._targets} | {id(s) for s, _ in self._passed}
        known = {id(t): t for t in self._guards.versioned() if id(t._s) in changed}
        self._versioned = list(known.values())
        numbers = [(n, v.vid) for n, v in self._written_arguments]
        self._new_values = [(number, index[vid]) for number, vid in numbers if vid is not None]
        self._pick_written = picker([position for _, position in self._new_values])
        needed = [value.slot for _, value in self._written_arguments]
        needed += [one.value.slot for one in wiring.fresh]
        self._kept_slots = tuple({slot for slot in needed if slot is not None})

    def _bind_donated(self) -> None:
        """Note which inputs' references are counted, and which others may be without a buffer."""
        self._pick_donated = picker(self.donated)
        # whose value the step replaces; a program that was made for another step may donate others, too
        replaced = {id(s) for s in (*self._targets, *(s for s, _ in self._passed))}
        numbers = {number for number, _ in self._written_arguments}
        sources = [self._sources[slot] for slot in self.donated]
        self._unshared_donated = [
            PICKED if s in numbers or id(s) in replaced else PICKED - 1 for s in sources
        ]
        looked_at = set(range(len(self._inputs))) - set(self.donated)
        looked_at.update(self._kept_slots, (slot for slot, _ in self._arguments))
        looked_at.update(slot for _, slot in self._passed)
        self._pick_looked_at = picker(sorted(looked_at))

    def _keeps_to_itself(self) -> bool:
        """Whether the values that the step writes go nowhere else, and the memory that it reuses was theirs."""
        index = self.program.output_index
        given = [value.vid for _, value in self._written_arguments]
        given += [one.value.vid for one in self._returned.fresh]
        shown = {index[vid] for vid in given if vid is not None}
        written = set(map(id, self._targets))
        return (
            not (self._kept_slots or self._passed or self._gradients.entering)
            and len(set(self._positions)) == len(self._positions)
            and shown.isdisjoint(self._positions)
            and all(id(self._inputs[slot]) in written for slot in self.donated)
        )

    def _count_own_references(self) -> None:
        """Count the replay's own references to each state; a state without other references has been dropped.

        The guards hold the tensors that they check themselves.
        """
        guarded = set(map(id, self._guards.storages()))
        self._counted = [s for s in self._states if id(s) not in guarded]
        lists = self._states, self._inputs, self._sources, self._targets, self._counted
        of_results = (r.storage for r in self._returned.results)
        held = Counter(map(id, itertools.chain(*lists, *self._passed, of_results)))
        self._own_references = [held[id(s)] + ALONE - 1 for s in self._counted]
        self._last_references: list[int] = []

    @property
    def numbers(self) -> np.ndarray:
        """The lifted floats of the last run (float64)."""
        return self._numbers.last

    @property
    def integers(self) -> np.ndarray:
        """The lifted integers, with the seeds of the recording (int64)."""
        return self._ints

    # -- checking ------------------------------------------------------------------------------

    def inputs(self, arguments: Sequence[XLATensor]) -> list[HeldBuffer]:
        """The present values of the program's inputs; donated inputs are copied."""
        trace = self.trace
        with trace.lock:
            trace.flush(trace)
            deferred_steps.finish(trace)
            buffers = self._collect(self._check(arguments))
            for slot in self.donated:
                buffers[slot] = trace.backend.copy(self._computed(buffers, slot))
            return buffers

    def compare(self, buffers: list[HeldBuffer], seen: Observation) -> None:
        """Raise CaptureError if a call that ran its Python code differs from a replay.

        ``buffers`` are the ``inputs`` from before the call, ``seen`` is the record of the call.
        """
        same = seen.program is self.program if seen.last is self.last else self._is_remade(seen)
        if not same:
            self._differs("it is another program")
        given = all_arguments(seen, self._gradients.entering)
        if (other := other_input(self._sources, seen, given)) is not None:
            self._differs(f"it takes another tensor of {other.meta}")
        if not self._gradients.are_left_as(seen):
            self._differs("it leaves other parameters without a gradient")
        self._numbers.compare(seen)
        trace = self.trace
        put = trace.backend.put_numbers
        buffers += [put(np.array(seen.floats, np.float64))] if seen.floats else []
        buffers += [put(np.array(seen.ints, np.int64))] if seen.ints else []
        results: list[Operand] = []
        run_step.launch(trace, self.program, buffers, results, (), recorded=self._blank)
        gradients = [p.grad for p in self._gradients.owners]
        targets = self._targets[: len(self._targets) - len(gradients)]
        targets += [g._s for g in gradients]
        written = [(given[number], position) for number, position in self._new_values]
        for s, position in (*zip(targets, self._positions, strict=True), *written):
            first, second = (trace.backend.get(b) for b in (s.buffer, results[position]))
            if first.tobytes() != second.tobytes():
                text = errors.MSG_CHECK_VALUE.format(number=position, meta=s.meta)
                self._differs(text)
        self._gradients.use(gradients)
        self._targets[:] = targets

    def _is_remade(self, seen: Observation) -> bool:
        """Whether a call recorded this step anew, as the device has dropped its steps; it is the known one then."""
        before, now = ([entry.key for entry in last.path()] for last in (self.last, seen.last))
        if before != now or seen.program.output_index != self.program.output_index:
            return False
        self.last, self._blank = seen.last, copy.copy(self.trace)
        return True

    def _differs(self, why: str) -> None:
        raise refuse(errors.MSG_CHECK, name=self._name, why=why)

    # -- running -------------------------------------------------------------------------------

    def run(self, arguments: Sequence[XLATensor]) -> Tree:
        """Enqueue the step, and return its results. Raises CaptureError if something has changed since then."""
        trace = self._trace
        with trace.bare:
            if trace.thread != get_ident():
                trace.turns.take()
            if trace.cur.depth:
                trace.flush(trace)
            deferred_steps.finish(trace)
            arguments = self._check(arguments)
            program = self.program
            safe = not self.donated or trace.backend.has_room(program.memory_needed())
            attached = self._gradients.are_unshared(self._targets)
            # listeners get the results, and may keep them
            alone = not (trace.parked or events.listening(events.ProgramExecuted))
            undisturbed = attached and safe and alone
            adopted: Iterable[None] = ()
            kept: Buffers = {}
            if lent := undisturbed and self._lending.active:
                buffers = self._lending.inputs(arguments, self._given)
            else:
                trace.recall_loan()
                buffers = self._collect(arguments)
                adopted = self._adopted(buffers)
                kept = {slot: buffers[slot] for slot in self._kept_slots}
                if not attached:
                    self._renew_gradients()
                self._protect(buffers, safe)
            results: list[Operand] = []
            before = self._present_numbers()
            try:
                self._append_numbers(buffers)
                work = itertools.chain(self._storing(buffers, results, undisturbed, lent), adopted)
                if not attached:
                    work = itertools.chain(work, self._gradients.attaching())
                if self._writes_arguments or trace.parked:
                    work = itertools.chain(work, self._writing(arguments, results, kept))
                run_step.launch(
                    trace, program, buffers, results, work, not safe, self._blank, self._watched
                )
            except BaseException as error:
                if not results:  # it has not been launched
                    self._take_back(before)
                if isinstance(error, Exception):
                    self._lose(error, arguments)
                raise
            self._end(arguments)
            self._guards.set_flags()
            counters.increment(REPLAYED)
            return self._returned.give(arguments, results, kept)

    def _present_numbers(self) -> tuple[ForeignObject, int]:
        """What ``_append_numbers`` advances, as it is now."""
        seeds = random_state.get_state(self._trace.device.index) if self._drawn.count else 0
        return self._numbers.present(), seeds

    def _take_back(self, before: tuple[ForeignObject, int]) -> None:
        """Make what ``_append_numbers`` has advanced what it was."""
        numbers, seeds = before
        self._numbers.restore(numbers)
        if self._drawn.count:
            random_state.set_state(seeds, self._trace.device.index)

    def _append_numbers(self, buffers: list[HeldBuffer]) -> None:
        """Add the step's numbers to the program's inputs; advances schedules, counts and random state."""
        put = self._trace.backend.put_numbers
        floats = self._numbers.advance()
        if self._floats:
            buffers.append(put(floats) if self._kept_floats is None else self._kept_floats)
        if self._ints.size:
            buffers.append(put(self._draw()) if self._kept_ints is None else self._kept_ints)

    def _storing(
        self, buffers: list[HeldBuffer], results: list[Operand], undisturbed: bool, lent: bool
    ) -> Iterator[None]:
        """The work that stores results in tensors, or keeps them for the next run (see ``Lending``)."""
        # taken from the results when these are there
        values = map(self._pick_results, (results,))
        if lent:
            return self._lending.storing(values)
        if undisturbed and self._may_lend:
            work = self._lending.beginning(buffers, values)
            if work is not None:
                return work
        return binding(self._targets, itertools.chain.from_iterable(values))

    def _check(self, arguments: Sequence[XLATensor]) -> Sequence[XLATensor]:
        """Raise CaptureError if something has changed since the recording; gives all arguments, gradients too."""
        self._guards.check()
        references = list(map(getrefcount, self._counted))
        if references != self._last_references:
            if any(map(operator.le, references, self._own_references)):
                self._tell_dropped()
            self._last_references = references
        self._gradients.check()
        if self._gradients.entering:
            arguments = [*arguments, *self._gradients.entered(self._trace)]
        self._numbers.check()
        storages = [t._s for t in arguments]
        if len(set(map(id, storages))) != len(storages) or not self._state_ids.isdisjoint(
            map(id, storages)
        ):
            raise refuse(errors.MSG_ALIASES, name=self._name)
        return arguments

    def _tell_dropped(self) -> None:
        dropped = map(operator.le, map(getrefcount, self._counted), self._own_references)
        number = list(dropped).index(True)
        what = f"a tensor of {self._counted[number].meta} that the step holds"
        raise refuse(errors.MSG_REPLACED, name=self._name, what=what)

    def _collect(self, arguments: Sequence[XLATensor]) -> list[HeldBuffer]:
        """The buffers of the program's inputs, in its order.

        None for a donated state that is not computed yet, if the step neither returns nor passes it on.
        """
        inputs = self._inputs
        for slot, number in self._arguments:
            inputs[slot] = arguments[number]._s
        try:
            buffers = list(map(_BUFFER, inputs))
            looked_at = self._pick_looked_at(buffers)
            if self._mesh or any(map(operator.is_, looked_at, itertools.repeat(None))):
                buffers = [self._ready(s) for s in inputs]
            return buffers
        finally:
            for slot, _ in self._arguments:
                inputs[slot] = _EMPTY

    def _computed(self, buffers: Sequence[HeldBuffer], slot: int) -> HeldBuffer:
        """The buffer in ``slot``, also of a state for which ``_collect`` gave None."""
        buffer = buffers[slot]
        return self._ready(self._inputs[slot]) if buffer is None else buffer

    def _ready(self, s: Storage | Constant) -> HeldBuffer:
        if isinstance(s, Constant):
            return s.buffer
        trace = self._trace
        trace.compute(s)
        if s.buffer is None:
            trace.add_input(s)  # it was never written to: zeros
            trace.flush(trace)
        return trace.backend.device_buffer(s)

    def _given(self, s: Storage) -> HeldBuffer:
        """The buffer of an argument."""
        return self._ready(s) if self._mesh or s.buffer is None else s.buffer

    def _adopted(self, buffers: Sequence[HeldBuffer]) -> Iterable[None]:
        """The work that gives tensors the values of inputs."""
        if not self._passed:
            return ()
        backend = self._trace.backend
        values = [backend.buffer_for_copy(s, buffers[slot]) for s, slot in self._passed]
        return binding([s for s, _ in self._passed], values)

    def _protect(self, buffers: list[HeldBuffer], safe: bool) -> None:
        """Replace donated buffers by copies if they have other references; all of them unless it is ``safe``.

        Donated inputs that are not computed yet are, as None has many other references.
        """
        counts = list(map(getrefcount, self._pick_donated(buffers)))
        if safe and counts == self._unshared_donated:
            return
        copied = self._trace.backend.copy
        for slot, count, unshared in zip(self.donated, counts, self._unshared_donated, strict=True):
            if not safe or count > unshared:
                buffers[slot] = copied(self._computed(buffers, slot))
                self.program.copied_donations += 1

    def _draw(self) -> np.ndarray:
        ints = self._ints
        if self._drawn.count:
            index = self._trace.device.index
            ints = ints.copy()
            ints[self._seed_positions] = random_state.draw(index, self._places, self._drawn.count)
        return ints

    def _writing(
        self, arguments: Sequence[XLATensor], results: list[Operand], kept: Buffers
    ) -> Iterator[None]:
        """The work that gives arguments their new values, clears gradients, and leaves other threads' steps alone.

        Such a step has read former values of tensors, and keeps these.
        """
        values = itertools.chain.from_iterable(map(self._pick_written, (results,)))
        work = replacing([arguments[number]._s for number, _ in self._new_values], values)
        passed = [(n, kept[v.slot]) for n, v in self._written_arguments if v.vid is None]
        storages = [arguments[number]._s for number, _ in passed]
        adopted = replacing(storages, [buffer for _, buffer in passed])
        changed = [*self._targets, *(s for s, _ in self._passed)] if self._trace.parked else []
        return itertools.chain(work, adopted, self._gradients.clearing(), leaving(changed))

    def _lose(self, error: Exception, arguments: Sequence[XLATensor]) -> None:
        """Mark the tensors without a value whose buffers a failed launch has donated."""
        for s in (*self._states, *(t._s for t in arguments)):
            deleted = getattr(s.buffer, "is_deleted", None)
            if deleted is not None and deleted():
                poison(s, error)

    def _end(self, arguments: Sequence[XLATensor]) -> None:
        """Tell autograd which tensors have new values."""
        if self._versioned:
            increment_version(self._versioned)
        if self._written_arguments:
            increment_version([arguments[number] for number, _ in self._written_arguments])

    def _renew_gradients(self) -> None:
        """Use new tensors for gradients with other references, so that these keep their values."""
        first = len(self._targets) - len(self._gradients.tensors)
        for number, fresh in self._gradients.renewed(self._trace, self._targets, first):
            self._targets[first + number] = fresh
