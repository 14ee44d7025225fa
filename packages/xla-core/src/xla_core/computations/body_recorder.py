"""Records the body of a computation separately from the step: with stand-ins for its arguments, into another tree.

The body's operations go through the device's trace like any others, so that autograd, autocast, views and in-place
operators work as they do outside. The step waits until the body has been recorded. A tensor that the body uses but
did not get as an argument becomes an input of it: a *captured* value. The tree keeps all bodies, so recording a
body again takes one look-up per operator, and compiles nothing new.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final

import jax
import numpy as np
import torch

from xla_core.compilation import build_program
from xla_core.contract.foreign_values import ForeignObject
from xla_core.lowering.evaluate import Lifted, Scope
from xla_core.lowering.repeat_graph import OpInstance
from xla_core.operators.plan import SEED
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Entry, Operation, Root, inputs_of, operations_of
from xla_core.recording.step_key import Lift
from xla_core.recording.step_record import Recording, RecordingMode
from xla_core.recording.step_turns import backward_caller
from xla_core.recording.storage import PLACEHOLDER, NoValueError, Storage, StorageState, poison
from xla_core.recording.trace import MAX_ENTRIES, Trace
from xla_core.recording.xla_tensor import XLATensor
from xla_core.support import indivisible
from xla_core.torch_bridge import torch_private

MSG_READS: Final = (
    "{what} is recorded once for all its runs, so that nothing in it may read a value (print, "
    ".item(), .cpu(), a Python condition on a tensor), sync, or run an operator on the CPU"
)
MSG_WRITES: Final = (
    "{what} writes in place to {target}, which a recorded function cannot; return the new value "
    "instead"
)
MSG_LEAKED: Final = (
    "this tensor was computed inside {what}, whose values exist only while it runs; return it "
    "from there instead"
)
MSG_RESULT: Final = "{what} returned {got} where a tensor on {device} is needed"


@dataclasses.dataclass(eq=False)
class _BodyTree:
    """The tree of all bodies that one trace has recorded, and the number of its entries."""

    root: Root
    entries: int


_body_trees: weakref.WeakKeyDictionary[Trace, _BodyTree] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True, slots=True)
class _Used:
    """A storage that the body uses, with its state at the first use; ``own``: the body may write to it."""

    storage: Storage
    state: StorageState
    own: bool

    @property
    def written(self) -> bool:
        """Whether the storage has been written to since."""
        return self.storage.version != self.state.version

    def restore(self) -> None:
        """Restore the storage's state at the first use."""
        self.storage.restore(self.state)


class _Turnstile:
    """A trace's lock while a body is recorded: other threads wait until the body is complete.

    The thread that records passes, and so does autograd's thread in the body's own backward pass. A single autograd
    thread runs all backward passes of a device, so the backward pass of another thread must not wait in
    it: the body is suspended while that pass records an operator. A body may also be recorded inside a backward
    pass (of a checkpointed function, which computes again). The passes that this pass's caller runs belong to the
    body, too.
    """

    def __init__(self, recorder: Recorder, outer: AbstractContextManager[object]) -> None:
        self._recorder = recorder
        self._outer = outer
        self._inner = threading.RLock()
        self._owner = threading.get_ident()
        inside = torch_private.current_backward() != -1
        self._callers = {None, self._owner, backward_caller() if inside else None}
        self._held = threading.local()

    def __enter__(self) -> None:
        backward = torch_private.current_backward() != -1
        passes = backward or threading.get_ident() == self._owner
        lock = self._inner if passes else self._outer
        lock.__enter__()
        foreign = backward and backward_caller() not in self._callers
        held = getattr(self._held, "locks", ())
        if foreign and not any(suspends for _, suspends in held):
            self._recorder.suspend()
            held = (*held, (lock, True))
        else:
            held = (*held, (lock, False))
        self._held.locks = held

    def __exit__(self, *error: object) -> None:
        *held, (lock, suspended) = self._held.locks
        self._held.locks = tuple(held)
        if suspended:
            self._recorder.resume()
        lock.__exit__(*error)


class Recorder:
    """Records one body: ``with trace.lock, contextlib.closing(recorder), recorder:`` around the user's function.

    ``close()`` ends the recording if an exception (Ctrl-C) kept the block from doing so.

    ``what`` names the body in errors. After the block, ``end`` is the body's last entry, and ``floats`` and
    ``ints`` are the numbers that it lifted.
    """

    def __init__(self, trace: Trace, what: str) -> None:
        self.trace = trace
        self.what = what
        self.stand_ins: list[XLATensor] = []
        self.captured: list[Storage] = []
        self.end: Entry = trace.root
        self.floats: list[float] = []
        self.ints: list[int] = []
        self._used: dict[int, _Used] = {}
        # the recording that waits for the body; ``_body`` is the body's own while it is suspended
        self._outside = trace.recording()
        self._body = self._outside
        # storages that were created from buffers inside the body, by id
        self._created: dict[int, Storage] = {}
        self._written: list[Storage] = []
        # while suspended: captured storages with their states inside the body
        self._suspended: list[tuple[_Used, StorageState]] = []
        self._step: ForeignObject = None  # a Step, once suspended
        # the recorder of the body inside which this body is recorded
        self._outer_recorder: Recorder | None = None

    # -- inside the block ----------------------------------------------------------------------

    def stand_in(self, meta: TensorMeta, requires_grad: bool = False) -> XLATensor:
        """A tensor that stands for an argument of the shape and dtype ``meta``.

        It has no value that can be read.
        """
        tensor = self.trace.from_buffer(PLACEHOLDER, meta)
        self.stand_ins.append(tensor)
        return tensor.requires_grad_(requires_grad) if requires_grad else tensor

    def value(self, tensor: object) -> int:
        """The number of a result's value in the body.

        Raises TypeError unless it is a tensor on the body's device.
        """
        if not isinstance(tensor, XLATensor) or tensor._s.trace is not self.trace:
            got = tensor.device if isinstance(tensor, torch.Tensor) else repr(tensor)
            text = MSG_RESULT.format(what=self.what, got=got, device=self.trace.device)
            raise TypeError(text)
        return self.trace.value_of(tensor)

    def sources(self) -> list[int]:
        """For each input of the body, the index of its stand-in, or -1 minus that of its captured storage."""
        numbers = {id(t._s): i for i, t in enumerate(self.stand_ins)}
        numbers.update({id(s): -1 - i for i, s in enumerate(self.captured)})
        trace = self.trace
        return [numbers[id(trace.touched[p])] for p in trace.input_storages]

    # -- the block itself ----------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        trace = self.trace
        outside = self._outside = trace.recording()
        tree = _body_trees.get(trace)
        if tree is None or tree.entries > MAX_ENTRIES:
            tree = _BodyTree(Root(), 0)
        refused = MSG_READS.format(what=self.what)
        turnstile = _Turnstile(self, trace.lock)
        mode = RecordingMode(
            root=tree.root,
            entries=tree.entries,
            eager_flush=False,
            body_recorder=self,
            lock=turnstile,
            bare=turnstile,
        )
        step = outside.step.renewed(tree.root)._replace(forbidden=refused, unreadable=refused)
        indivisible.do(trace.installing(Recording(step, mode)))
        return self

    def __exit__(self, kind: object, error: object, _traceback: object) -> None:
        self.close()
        if error is None:
            self._check_writes()

    def close(self) -> None:
        """Install the step in the trace again, unless that has happened."""
        trace = self.trace
        if trace.body_recorder is not self:
            return
        self.end, self.floats, self.ints = trace.cur, trace.floats, trace.ints
        self._release_storages()
        _body_trees[trace] = _BodyTree(trace.root, trace.entries)
        indivisible.do(trace.installing(self._outside))

    def suspend(self) -> None:
        """Install the recording outside of the body, so that another thread's backward pass can record in its step.

        ``resume`` installs the body again.
        """
        trace = self.trace
        self._body = trace.recording()
        # meanwhile captured storages have the values from before the body
        self._suspended = []
        for used in self._used.values():
            if not used.own:
                self._suspended.append((used, used.storage.state()))
                used.restore()
        # the body's turnstile remains the trace's lock, so that other threads still wait
        indivisible.do(trace.installing(_behind(self._outside, trace.lock, trace.bare)))
        outer = trace.body_recorder
        self._outer_recorder = outer if isinstance(outer, Recorder) else None
        if self._outer_recorder is not None:
            self._outer_recorder.suspend()
            return
        self._step = trace.turns.active
        trace.turns.take()

    def resume(self) -> None:
        """Continue with the body. Operations that were recorded outside of it meanwhile stay outside."""
        trace = self.trace
        if self._outer_recorder is not None:
            self._outer_recorder.resume()
        else:
            trace.turns.leave_to(self._step)
        mode = self._outside.mode
        self._outside = _behind(trace.recording(), mode.lock, mode.bare)
        for used, inside in self._suspended:
            s = used.storage
            # the other thread may have written to it: that state is now the one before the body
            self._used[id(s)] = _Used(s, s.state(), False)
            writes = inside.version - used.state.version
            s.restore(inside._replace(version=s.version + writes))
        indivisible.do(trace.installing(self._body))

    def note_created(self, s: Storage) -> None:
        """Remember a storage that belongs to the body: that of a stand-in, or of a tensor from the host."""
        self._created[id(s)] = s

    def note_input(self, s: Storage) -> None:
        """Remember the state of a storage that becomes an input of the body; a pending one becomes an input too."""
        if s.buffer is PLACEHOLDER and id(s) in self._created:
            return
        # an unwritten tensor may have been created inside the body or outside; it counts as the body's, and is
        # poisoned afterwards
        unwritten = s.buffer is None and s.epoch <= 0
        own = unwritten or id(s) in self._created
        self._used[id(s)] = _Used(s, s.state(), own)
        if s.buffer is None and not unwritten:
            s.relocate(PLACEHOLDER)
        if s.buffer is not None:
            self.captured.append(s)

    def _release_storages(self) -> None:
        """Restore captured storages; poison every storage whose value exists only inside the body."""
        error = NoValueError(MSG_LEAKED.format(what=self.what))
        self._written = [u.storage for u in self._used.values() if u.written and not u.own]
        poisoned = {id(s): s for s in (*self.trace.touched, *(t._s for t in self.stand_ins))}
        for used in self._used.values():
            s = used.storage
            if not (used.written and used.own):
                used.restore()
                poisoned.pop(id(s), None)
            elif used.state.buffer is not None and s in self.captured:
                # the body wrote to its own tensor: each run must start from the value before the write
                constant = Storage(self.trace, s.meta, -1, -1)
                constant.bind(used.state.buffer)
                self.captured[self.captured.index(s)] = constant
        for s in poisoned.values():
            poison(s, error)

    def _check_writes(self) -> None:
        target = None
        if self._written:
            target = f"a tensor of {tuple(self._written[0].meta.shape)} that it was not given"
        for number, tensor in enumerate(self.stand_ins):
            if tensor._s.version:
                target = f"its argument number {number} (flattened)"
        if target is not None:
            raise RuntimeError(MSG_WRITES.format(what=self.what, target=target))


def _behind(
    recording: Recording, lock: AbstractContextManager[object], bare: AbstractContextManager[object]
) -> Recording:
    """``recording`` with other locks."""
    return recording._replace(mode=recording.mode._replace(lock=lock, bare=bare))


class Body:
    """A recorded body, for lowering: its entries, up to ``end``, and the sources of its inputs.

    ``inputs`` maps the value number of each input to its source; see ``Recorder.sources``. ``metas`` has the shape
    and the dtype of each value, None for a value that is not a tensor.
    """

    def __init__(self, end: Entry, sources: Sequence[int]) -> None:
        self.entries = end.path()
        numbers = (entry.first for entry in inputs_of(self.entries))
        self.inputs: dict[int, int] = dict(zip(numbers, sources, strict=True))
        self.metas = {e.first + i: m for e in self.entries for i, m in enumerate(e.metas)}
        self._seeds = {
            operation.kwargs[SEED].position: operation.depth - 1
            for operation in operations_of(self.entries)
            if isinstance(operation.kwargs.get(SEED), Lift)
        }

    def meta(self, vid: int) -> TensorMeta:
        """The shape and the dtype of value ``vid``, which must be a tensor."""
        meta = self.metas[vid]
        assert meta is not None
        return meta

    def text(self, outputs: Iterable[int]) -> bytes:
        """A description of the whole body with the results ``outputs``.

        Equal bodies have the same in all processes.
        """
        return build_program.key_text(self.entries, list(outputs), ()) + repr(self.inputs).encode()

    def numbers(self, ints: Sequence[int]) -> list[int]:
        """The lifted ints, with 0 for seeds, which each run of the body derives from the computation's seed."""
        return [0 if i in self._seeds else n for i, n in enumerate(ints)]

    def is_random(self, entries: Iterable[Entry]) -> bool:
        """Whether some of these entries draw random numbers."""
        return any(SEED in operation.kwargs for operation in operations_of(entries))

    def run(
        self,
        entries: Iterable[Entry],
        given: Mapping[int, jax.Array],
        floats: Sequence[jax.Array],
        ints: Sequence[jax.Array],
        key: jax.Array,
    ) -> Scope:
        """Compute all values of ``entries`` under jax, from the values ``given`` by their numbers.

        ``floats`` and ``ints`` are the lifted numbers, and ``key`` is a PRNG key, or None if no entry is random.
        """
        numbers = list(ints)
        if key is not None:
            for position, number in self._seeds.items():
                bits = jax.random.bits(jax.random.fold_in(key, number), (), np.uint64)
                numbers[position] = jax.lax.bitcast_convert_type(bits, np.int64)
        scope = Scope({}, Lifted(floats, numbers))
        scope.update(given)
        for operation in operations_of(entries):
            scope.compute(OpInstance(operation))
        return scope


def needed(entries: Sequence[Entry], wanted: Iterable[int]) -> list[Operation]:
    """The operations on which the values ``wanted`` depend, in order, without inputs."""
    missing = set(wanted)
    operations: list[Operation] = []
    for entry in reversed(operations_of(entries)):
        if not missing.isdisjoint(range(entry.first, entry.end)):
            operations.append(entry)
            missing.update(ref.vid for ref in entry.references())
    operations.reverse()
    return operations
