"""Records the body of a computation aside from the step: on stand-ins, into a tree of its own.

The body's operations go through the device's trace like any others, so that autograd, autocast, views
and in-place operators work as they do outside. Meanwhile the step waits. What the body uses and was not
given becomes an input of it: a *captured* value. What was recorded before is found again in the tree:
recording a body once more costs a look-up per operator, and compiles nothing new.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
import torch

from xla_core.compilation import build_program
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
class _Aside:
    """The tree of all bodies that one trace recorded."""

    root: Root
    entries: int


_aside: weakref.WeakKeyDictionary[Trace, _Aside] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    """A storage as it was when the body first used it; ``own``: the body may write to it."""

    storage: Storage
    state: StorageState
    own: bool

    @property
    def written(self) -> bool:
        """Whether it was written to since."""
        return self.storage.version != self.state.version

    def restore(self) -> None:
        """Give the storage back what it held."""
        self.storage.restore(self.state)


class _Turnstile:
    """A trace's lock while a body is recorded: other threads wait until it is done.

    The thread that records may pass, and autograd's thread with the body's own backward pass. One thread of
    autograd's runs all backward passes of a device, so another thread's must not wait in it: the body steps
    aside while that pass records an operator. A body may be recorded inside a backward pass (a checkpointed
    function that is computed again): what that pass's caller called is the body's own, too.
    """

    def __init__(self, recorder: Recorder, outer: Any) -> None:
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
        if foreign and not any(aside for _, aside in held):
            self._recorder.step_aside()
            held = (*held, (lock, True))
        else:
            held = (*held, (lock, False))
        self._held.locks = held

    def __exit__(self, *error: object) -> None:
        *held, (lock, aside) = self._held.locks
        self._held.locks = tuple(held)
        if aside:
            self._recorder.come_back()
        lock.__exit__(*error)


class Recorder:
    """Records one body: ``with trace.lock, contextlib.closing(recorder), recorder:`` around the user's function.

    ``close()`` ends what an exception kept the block from ending.

    ``what`` names the body in errors. After the block ``end`` is the entry that the body ends with,
    and ``floats`` and ``ints`` the numbers that it lifted.
    """

    def __init__(self, trace: Trace, what: str) -> None:
        self.trace = trace
        self.what = what
        self.stand_ins: list[XLATensor] = []
        self.captured: list[Storage] = []
        self.end: Entry = trace.root
        self.floats: list[float] = []
        self.ints: list[int] = []
        self._kept: dict[int, _Kept] = {}
        # what the trace recorded before the body; ``_body`` while another thread's pass goes in between
        self._outside = trace.recording()
        self._body = self._outside
        self._made: dict[int, Storage] = {}
        self._written: list[Storage] = []
        self._captured_as: list[tuple[_Kept, StorageState]] = []
        self._step: Any = None
        self._around: Recorder | None = None

    # -- inside the block ----------------------------------------------------------------------

    def stand_in(self, meta: TensorMeta, requires_grad: bool = False) -> XLATensor:
        """A tensor in place of an argument; its value is none that anybody could read."""
        tensor = self.trace.from_buffer(PLACEHOLDER, meta)
        self.stand_ins.append(tensor)
        return tensor.requires_grad_(requires_grad) if requires_grad else tensor

    def value(self, tensor: Any) -> int:
        """The number of a result's value in the body. Raises TypeError for what is no such tensor."""
        if not isinstance(tensor, XLATensor) or tensor._s.trace is not self.trace:
            got = tensor.device if isinstance(tensor, torch.Tensor) else repr(tensor)
            text = MSG_RESULT.format(what=self.what, got=got, device=self.trace.device)
            raise TypeError(text)
        return self.trace.value_of(tensor)

    def sources(self) -> list[int]:
        """For each of the body's inputs: the number of its stand-in, or -1 - that of a captured one."""
        numbers = {id(t._s): i for i, t in enumerate(self.stand_ins)}
        numbers.update({id(s): -1 - i for i, s in enumerate(self.captured)})
        trace = self.trace
        return [numbers[id(trace.touched[p])] for p in trace.input_storages]

    # -- the block itself ----------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        trace = self.trace
        outside = self._outside = trace.recording()
        aside = _aside.get(trace)
        if aside is None or aside.entries > MAX_ENTRIES:
            aside = _Aside(Root(), 0)
        refused = MSG_READS.format(what=self.what)
        turnstile = _Turnstile(self, trace.lock)
        mode = RecordingMode(
            root=aside.root,
            entries=aside.entries,
            eager_flush=False,
            aside=self,
            lock=turnstile,
            bare=turnstile,
        )
        step = outside.step.renewed(aside.root)._replace(forbidden=refused, unreadable=refused)
        indivisible.do(trace.installing(Recording(step, mode)))
        return self

    def __exit__(self, kind: Any, error: object, _traceback: Any) -> None:
        self.close()
        if error is None:
            self._check_writes()

    def close(self) -> None:
        """Let the trace go on with its step, if it does not already."""
        trace = self.trace
        if trace.aside is not self:
            return
        self.end, self.floats, self.ints = trace.cur, trace.floats, trace.ints
        self._let_go()
        _aside[trace] = _Aside(trace.root, trace.entries)
        indivisible.do(trace.installing(self._outside))

    def step_aside(self) -> None:
        """Let another thread's backward pass record in its own step; ``come_back`` ends that."""
        trace = self.trace
        self._body = trace.recording()
        # what the user sees of them meanwhile is what they held before the body
        self._captured_as = []
        for kept in self._kept.values():
            if not kept.own:
                self._captured_as.append((kept, kept.storage.state()))
                kept.restore()
        # the body's turnstile stays: it keeps others out meanwhile
        indivisible.do(trace.installing(_behind(self._outside, trace.lock, trace.bare)))
        self._around = trace.aside if isinstance(trace.aside, Recorder) else None
        if self._around is not None:
            self._around.step_aside()
            return
        self._step = trace.turns.active
        trace.turns.take()

    def come_back(self) -> None:
        """Go on with the body; what was recorded outside of it meanwhile stays there."""
        trace = self.trace
        if self._around is not None:
            self._around.come_back()
        else:
            trace.turns.leave_to(self._step)
        mode = self._outside.mode
        self._outside = _behind(trace.recording(), mode.lock, mode.bare)
        for kept, inside in self._captured_as:
            s = kept.storage
            self._kept[id(s)] = _Kept(s, s.state(), False)
            writes = inside.version - kept.state.version
            s.restore(inside._replace(version=s.version + writes))
        indivisible.do(trace.installing(self._body))

    def made(self, s: Storage) -> None:
        """A stand-in, or a tensor from the host: the body's own."""
        self._made[id(s)] = s

    def captures(self, s: Storage) -> None:
        """A storage becomes an input: remember what it held, and let a pending one be an input too."""
        if s.buffer is PLACEHOLDER and id(s) in self._made:
            return
        # an unwritten tensor may belong to the body or not; if it does not, it is poisoned
        unwritten = s.buffer is None and s.epoch <= 0
        own = unwritten or id(s) in self._made
        self._kept[id(s)] = _Kept(s, s.state(), own)
        if s.buffer is None and not unwritten:
            s.relocate(PLACEHOLDER)
        if s.buffer is not None:
            self.captured.append(s)

    def _let_go(self) -> None:
        """Restore captured storages; poison every storage whose value exists only inside the body."""
        error = NoValueError(MSG_LEAKED.format(what=self.what))
        self._written = [k.storage for k in self._kept.values() if k.written and not k.own]
        poisoned = {id(s): s for s in (*self.trace.touched, *(t._s for t in self.stand_ins))}
        for kept in self._kept.values():
            s = kept.storage
            if not (kept.written and kept.own):
                kept.restore()
                poisoned.pop(id(s), None)
            elif kept.state.buffer is not None and s in self.captured:
                constant = Storage(self.trace, s.meta, -1, -1)
                constant.bind(kept.state.buffer)
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


def _behind(recording: Recording, lock: object, bare: object) -> Recording:
    """``recording`` behind other locks."""
    return recording._replace(mode=recording.mode._replace(lock=lock, bare=bare))


class Body:
    """What a recorder recorded, for lowering: the entries, and what their inputs stand for.

    ``inputs`` maps the value number of each input to its source, see ``Recorder.sources``. ``metas``
    gives shape and dtype of every value.
    """

    def __init__(self, end: Entry, sources: Sequence[int]) -> None:
        self.entries = end.path()
        given = (entry.first for entry in inputs_of(self.entries))
        self.inputs: dict[int, int] = dict(zip(given, sources, strict=True))
        self.metas = {e.first + i: m for e in self.entries for i, m in enumerate(e.metas)}
        self._seeds = {
            operation.kwargs[SEED].position: operation.depth - 1
            for operation in operations_of(self.entries)
            if isinstance(operation.kwargs.get(SEED), Lift)
        }

    def meta(self, vid: int) -> TensorMeta:
        """Shape and dtype of a value that is a tensor."""
        meta = self.metas[vid]
        assert meta is not None
        return meta

    def text(self, outputs: Iterable[int]) -> bytes:
        """The body in full, equal for equal bodies in every process."""
        return build_program.key_text(self.entries, list(outputs), ()) + repr(self.inputs).encode()

    def numbers(self, ints: Sequence[int]) -> list[int]:
        """The lifted ints without seeds, which each run of the body gets from the computation's own."""
        return [0 if i in self._seeds else n for i, n in enumerate(ints)]

    def is_random(self, entries: Iterable[Entry]) -> bool:
        """Whether these entries need a seed."""
        return any(SEED in operation.kwargs for operation in operations_of(entries))

    def run(
        self,
        entries: Iterable[Entry],
        given: Mapping[int, jax.Array],
        floats: Sequence[jax.Array],
        ints: Sequence[jax.Array],
        key: jax.Array,
    ) -> Scope:
        """All values of ``entries`` under jax, from those ``given`` by number."""
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
    """The operations without which ``wanted`` cannot be computed, in order; inputs are left out."""
    missing = set(wanted)
    operations: list[Operation] = []
    for entry in reversed(operations_of(entries)):
        if not missing.isdisjoint(range(entry.first, entry.end)):
            operations.append(entry)
            missing.update(ref.vid for ref in entry.references())
    operations.reverse()
    return operations
