"""The lazy trace of one device: what was recorded since the last sync, and all that ever was.

Steps repeat, so every step ever recorded is kept as a path in a prefix tree: an ``Entry`` is one
operation in one position, its children are the operations that once followed. Recording
an operation that the tree knows is one dictionary look-up, and gives shapes, dtypes and value
numbers; at the end of a step the entry reached *is* the step's identity, with its compiled programs
on it. The path is the exact step key: nothing is hashed away.

Values are numbered in program order. ``step_key`` tells how an operation is written as a key.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import torch

from xla_core.contract import events
from xla_core.operators import error_messages
from xla_core.operators.tensor_meta import TensorMeta, tensor_meta
from xla_core.recording import source_location, step_key
from xla_core.recording.builtin_plans import AS_STRIDED, ZEROS, known_plan
from xla_core.recording.entry import Entry, Input, Operation, Root
from xla_core.recording.geometry import geometry
from xla_core.recording.step_key import HOST_FLOAT, HOST_INT, LIFT_FLOAT, LIFT_INT, LIST, SAME
from xla_core.recording.step_record import STEP, StepState, beginning
from xla_core.recording.step_turns import Step, Turns, turn_lock
from xla_core.recording.storage import Backend, Storage, View, chain, raise_if_poisoned
from xla_core.recording.xla_tensor import XLATensor, tensor_on
from xla_core.support import indivisible
from xla_core.torch_bridge import dtypes
from xla_core.torch_bridge.torch_private import make_wrapper

if TYPE_CHECKING:
    from xla_core.operators.plan import Plan

# More entries than this and the tree is dropped: a program whose every step is different must not
# keep all of them in memory. An entry takes about 1 KB, and a step of a 48-layer GPT has about 7,000.
MAX_ENTRIES: int = 500_000

# A loop that never syncs would hold the inputs of all its iterations: longer than this, the
# trace is run when the next tensor arrives from the host.
MAX_PENDING: Final = 100_000

_VALUE: Final = ("vid", "buffer", "epoch")
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class Trace(StepState):
    """What a thread has recorded on one device and not yet run; the others' steps are ``parked`` meanwhile.

    ``flush`` runs what is pending and ``backend`` transfers and compiles; both are given by the
    runtime when the device is made. The step itself and the rules that it is recorded under are the
    attributes of ``StepState``.

    A thread that takes ``lock`` finds its own step here. ``bare`` is the same lock without that: a handler may
    take it if it calls ``record`` first, which compares ``thread``, the number of the thread whose step is here.

    An exception may come at any bytecode (Ctrl-C). So each change of what is pending is one store, which comes
    last, or ``indivisible``: whatever was prepared before it is of no consequence.
    """

    def __init__(self, device: torch.device, flush: Callable[..., None], backend: Backend) -> None:
        self.device = device
        self.flush = flush
        self.backend = backend
        self.thread = 0
        self.root = Root()
        self.entries = 0
        self.reset()
        self.parked: dict[int, Step] = {}
        self.turns = Turns(self)
        self.bare = threading.RLock()
        self.lock = turn_lock(self, self.bare)

    def attach(self, backend: Backend) -> None:
        """Transfer and compile through another backend from now on. Nothing may be pending."""
        self.backend = backend

    def reset(self) -> None:
        """Begin a new step: nothing recorded, nothing lifted, no inputs."""
        indivisible.do(self.renewal())

    def renewal(self) -> Iterator[None]:
        """For ``indivisible.do``: what ``reset`` does. A tree that has grown too large is dropped."""
        if self.entries > MAX_ENTRIES:
            # reports that hold an entry would hold the whole tree
            events.emit(events.StepsForgotten(trace=self))
            root = Root()
            names = (*STEP, "root", "entries")
            return indivisible.storing(self, names, (*beginning(root), root, 0))
        return indivisible.storing(self, STEP, beginning(self.root))

    def standing_at(self, last: Entry, *, inputs: int | None = None, single: bool = False) -> Trace:
        """A copy that has come to ``last``, the end of another step: to make that one's program.

        It has the first ``inputs`` of this step's inputs (default: all). ``single`` says that the step is one
        operator, which is run by itself (default: as this one's are).
        """
        copied = copy.copy(self)
        copied.cur = last
        copied.inputs = self.inputs[:inputs]
        copied.input_storages = self.input_storages[:inputs]
        copied.eager_flush = single or self.eager_flush
        return copied

    def detached(self) -> Trace:
        """A copy that stands where this one does, and holds none of the step's tensors and buffers."""
        copied = self.standing_at(self.cur, inputs=0)
        copied.touched = []
        return copied

    @contextlib.contextmanager
    def looking(self, views: Sequence[View] = ()) -> Iterator[None]:
        """Undo, at the end of the block, what reading values in it recorded.

        ``views`` are those that the block reads. The caller holds the lock.
        """
        current, slots = self.cur, dict(self.input_vids)
        counts = len(self.inputs), len(self.touched), len(self.input_storages)
        stale = [v for v in views if v.epoch != self.epoch or v.version < 0]
        try:
            yield
        finally:
            for storage in self.touched[counts[1] :]:
                storage.epoch = -1
            for view in stale:
                view.epoch = -1
            del self.inputs[counts[0] :]
            del self.touched[counts[1] :]
            del self.input_storages[counts[2] :]
            self.cur, self.input_vids = current, slots

    def forget(self) -> None:
        """Drop all steps ever recorded, with their programs. Nothing may be pending."""
        events.emit(events.StepsForgotten(trace=self))
        root = Root()
        indivisible.do(indivisible.storing(self, ("root", "cur", "entries"), (root, root, 0)))

    # -- recording -----------------------------------------------------------------------------

    def record(self, plan: Plan, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Entry:
        """Append one operation and return its entry. The caller holds the lock.

        ``args`` and ``kwargs`` are what PyTorch called the operator of ``plan`` with: tensors of this device,
        numbers, and lists of them; CPU tensors without dimensions count as numbers. Nothing is computed.
        Raises what PyTorch raises for these operands, from its meta kernels; then nothing is recorded.
        """
        # The hottest function of all: it runs for each operator of each step. It repeats what ``_encode`` and
        # ``value_of`` do, as ``_encode_list`` does, to save a call per operand.
        if self.thread != get_ident():
            self.turns.take()
        # The key is the operation in full, so that equal keys after equal entries are equal steps. See
        # ``step_key`` for how each kind of operand is spelled; ``step_key.read`` takes it apart again.
        key: list[Any] = [plan.number]
        append = key.append
        epoch = self.epoch
        try:
            for a, lift in zip(args, plan.lift_mask):  # noqa: B905 - the mask is the longer one
                t = type(a)
                if t is XLATensor:
                    s = a._s
                    if s.trace is not self:
                        raise error_messages.other_device(plan.name, self.device, s.trace.device)
                    # A value number is true only in the step whose epoch goes with it: a storage that this
                    # step has not met is an input of it from now on, a view that was written past is read again.
                    v = a._v
                    if v is None:
                        if s.epoch != epoch:
                            self.add_input(s)
                        append(s.vid)
                    elif v.epoch == epoch and v.version == s.version:
                        append(v.vid)
                    else:
                        append(self.read_view(v, s))
                elif t is float:
                    # A number that may change from step to step is an argument of the program. 0 and 1 stay
                    # constants: compilers simplify with them, and they seldom change.
                    if lift and a != 0.0 and a != 1.0:
                        append(LIFT_FLOAT)
                        self.floats.append(a)
                    else:
                        # The type comes along, since 1 == 1.0 == True. Text stands for what is not equal to
                        # itself (nan) or equal to another number (0.0 and -0.0).
                        append(float)
                        append(a if a == a and a != 0.0 else repr(a))
                elif t is int:
                    if lift and a != 0 and a != 1 and _INT64_MIN <= a <= _INT64_MAX:
                        append(LIFT_INT)
                        self.ints.append(a)
                    else:
                        append(int)
                        append(a)
                elif a is None:
                    append(None)
                elif t is list or t is tuple:
                    self._encode_list(append, a, lift, plan)
                else:
                    self._encode_other(append, a, lift, plan)
            if kwargs:
                self._encode_kwargs(append, kwargs, plan)
            k = tuple(key)
            # read here, not above: inputs that the operands brought in have moved it on
            cur = self.cur
            entry = cur.first_child
            if entry is None or entry.key != k:
                entry = cur.other_children.get(k) or self._append_inferred(
                    k, plan, args, kwargs or {}
                )
            self.cur = entry  # the one store that makes the operation a part of the step
            return entry
        except BaseException:
            # What an operation lifted that is not recorded must not shift the numbers of the next one.
            del self.floats[self.cur.floats :]
            del self.ints[self.cur.ints :]
            raise

    def _encode_kwargs(
        self, append: Callable[[Any], None], kwargs: dict[str, Any], plan: Plan
    ) -> None:
        for name, value in kwargs.items():
            if name in plan.storage_arguments:
                continue
            append(name)
            self._encode(append, value, name in plan.lift_names, plan)

    def _encode(self, append: Callable[[Any], None], a: Any, lift: bool, plan: Plan) -> None:
        t = type(a)
        if t is list or t is tuple:
            self._encode_list(append, a, lift, plan)
        elif isinstance(a, XLATensor):
            append(self.value_of(a, plan))
        elif t is float:
            if lift and a != 0.0 and a != 1.0:
                append(LIFT_FLOAT)
                self.floats.append(a)
            else:
                append(float)
                append(a if a == a and a != 0.0 else repr(a))
        elif t is int:
            if lift and a != 0 and a != 1 and _INT64_MIN <= a <= _INT64_MAX:
                append(LIFT_INT)
                self.ints.append(a)
            else:
                append(int)
                append(a)
        elif a is None:
            append(None)
        else:
            self._encode_other(append, a, lift, plan)

    def _encode_list(
        self, append: Callable[[Any], None], items: Any, lift: bool, plan: Plan
    ) -> None:
        if not items:
            append(())
            return
        first = items[0]
        if type(first) is int and not lift:
            append(tuple(items))  # sizes and dimensions, the most frequent lists: one word
            return
        append(LIST)
        append(len(items))
        epoch = self.epoch
        if type(first) is XLATensor:
            for a in items:
                if type(a) is XLATensor and a._v is None:
                    s = a._s
                    if s.epoch != epoch:
                        if s.trace is not self:
                            raise error_messages.other_device(
                                plan.name, self.device, s.trace.device
                            )
                        self.add_input(s)
                    append(s.vid)
                else:
                    self._encode(append, a, lift, plan)
        elif _uniform(items):
            append(SAME)
            self._encode(append, first, lift, plan)
        else:
            for a in items:
                self._encode(append, a, lift, plan)

    def _encode_other(self, append: Callable[[Any], None], a: Any, lift: bool, plan: Plan) -> None:
        t = type(a)
        if isinstance(a, XLATensor):
            append(self.value_of(a, plan))
        elif isinstance(a, torch.Tensor):
            self._encode_host_tensor(append, a, plan)
        elif t is bool or t is str:
            append(t)
            append(a)
        elif isinstance(a, (float, int, complex, str)):  # numpy's scalars, enumerations
            for word in step_key.spelled(a):
                append(word)
        elif isinstance(a, (torch.dtype, torch.memory_format, torch.layout, torch.device)):
            append(a)
        elif isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise error_messages.symbolic(plan.name, a)
        else:
            raise error_messages.unknown_argument(plan.name, a)

    def _encode_host_tensor(
        self, append: Callable[[Any], None], a: torch.Tensor, plan: Plan
    ) -> None:
        """A CPU tensor among the operands: PyTorch allows one without dimensions, as a number."""
        if a.device.type == "cpu" and a.dim() and plan.copies_host_tensors():
            meta = tensor_meta(tuple(a.shape), a.dtype)
            array = self.backend.put(dtypes.to_numpy(a.detach()))
            append(self.value_of(self.from_buffer(array, meta), plan))
            return
        if a.device.type != "cpu" or a.dim() != 0:
            raise error_messages.not_an_xla_tensor(a, plan.name, self.device)
        if a.is_complex():  # too rare for a vector of lifted ones
            meta = tensor_meta((), a.dtype)
            array = self.backend.put(dtypes.to_numpy(a))
            append(self.value_of(self.from_buffer(array, meta), plan))
            return
        if a.is_floating_point():
            append(HOST_FLOAT)
            self.floats.append(a.item())
        else:
            append(HOST_INT)
            self.ints.append(int(a.item()))
        append(a.dtype)

    # -- values --------------------------------------------------------------------------------

    def is_pending(self, s: Storage) -> bool:
        """Whether a step that was not run, this thread's or another's, computes the value of ``s``."""
        return s.buffer is None and (s.epoch == self.epoch or s.epoch in self.parked)

    def compute(self, s: Storage, reading: bool = False) -> None:
        """Run the step in which the value of ``s`` is pending, if it is."""
        if s.buffer is None:
            if s.epoch == self.epoch:
                self.flush(self, reading)
            elif s.epoch in self.parked:
                self.turns.run(s.epoch, reading)

    def value_of(self, tensor: XLATensor, plan: Plan | None = None) -> int:
        """The number of ``tensor``'s current value in this step, of which it becomes an input if need be.

        ``plan`` is that of the operator that reads it, for the error (default: a read). Raises RuntimeError
        for a tensor of another device, and where the value is poisoned.
        """
        s = tensor._s
        if s.trace is not self:
            raise error_messages.other_device(
                plan.name if plan else "read", self.device, s.trace.device
            )
        v = tensor._v
        if v is not None:
            return self.read_view(v, s)
        if s.epoch != self.epoch:
            self.add_input(s)
        return s.vid

    def add_input(self, s: Storage) -> None:
        """Make a materialised storage an input of this step; ``s`` has a value number in it then.

        One that nobody has written to becomes zeros. Raises RuntimeError for a poisoned storage.
        """
        if self.aside is not None:
            self.aside.captures(s)
        elif self.parked and self.turns.meet(s):
            return
        buffer = s.buffer
        if buffer is None:
            raise_if_poisoned(s)
            self._materialise_empty(s)
            return
        # An input's key is the number of its shape and dtype; keys of operations are tuples.
        key = -s.meta.index
        cur = self.cur
        inputs = self.inputs
        slot = len(inputs)
        try:
            entry = cur.first_child
            if entry is None or entry.key != key:
                entry = cur.other_children.get(key) or self._follow(Input(cur, s.meta))
            vid = entry.first
            self.input_vids[vid] = slot
            self.input_storages.append(len(self.touched))
            self.touched.append(s)
            inputs.append(buffer)
            self.cur = entry
        except BaseException:
            if self.cur is cur:  # not an input: its place is the next one's
                self.input_vids.pop(cur.end, None)
                del inputs[slot:], self.input_storages[slot:]
            raise
        # The epoch comes last: until then the storage looks as if no step had met it, which is true enough.
        s.vid = vid
        s.epoch = self.epoch

    def _materialise_empty(self, s: Storage) -> None:
        # not by record(): an operation that is being recorded may have lifted numbers of its own
        zeros = known_plan(ZEROS)
        key = (zeros.number, s.meta.shape, "dtype", s.meta.dtype)
        entry = self._known(key) or self._append(key, zeros, s.meta.as_tuple)
        self.touched.append(s)
        s.vid = entry.first
        s.epoch = self.epoch

    def read_view(self, v: View, s: Storage) -> int:
        """The number of a view's current value, replaying the chain where it is out of date.

        ``s`` is the storage that ``v`` looks at. What is replayed is recorded, as operations of this step.
        """
        if v.epoch == self.epoch and v.version == s.version:
            return v.vid
        if self.parked:
            known = self.turns.meet_view(v, s)
            if known is not None:
                return known
        parent = v.parent
        if parent is not None:
            base = self.read_view(parent, s)
        else:
            if s.epoch != self.epoch:
                self.add_input(s)
            base = s.vid
        key = (v.plan.number, base, *v.tail)
        entry = self._known(key) or self._append(key, v.plan, v.meta.as_tuple)
        v.vid = entry.first
        v.epoch = self.epoch
        v.version = s.version
        return v.vid

    def _known(self, key: Any) -> Entry | None:
        """Go on to the operation with this key, if it once followed here."""
        entry = self.cur.first_child
        if entry is None or entry.key != key:
            entry = self.cur.other_children.get(key)
            if entry is None:
                return None
        self.cur = entry
        return entry

    def _append(self, key: Any, plan: Plan, metas: tuple[TensorMeta, ...]) -> Entry:
        """Go on to an operation that never followed here, whose results are known."""
        cur = self.cur
        entry = self.cur = self._follow(Operation(cur, key, plan, metas, cur.floats, cur.ints))
        return entry

    def _follow(self, entry: Entry) -> Entry:
        """``entry``, made to follow the current one, in the tree."""
        self.cur.add(entry)
        self.entries += 1
        return entry

    def assign(self, s: Storage, vid: int) -> None:
        """Make value ``vid`` of this step the storage's whole value."""
        s.version += (
            1  # before the value: what views know may be out of date too early, never too late
        )
        if s.epoch == self.epoch:
            # the step's inputs still hold it, and alone they may donate it; an input without
            # a buffer that keeps its number gets its buffer back
            s.buffer = None
            s.vid = vid
        else:
            self.touched.append(s)
            changed = indivisible.storing(s, _VALUE, (vid, None, self.epoch))
            indivisible.do(changed)

    def write(self, tensor: XLATensor, vid: int) -> None:
        """Make value ``vid`` of this step what ``tensor`` shows, through its views to the storage.

        Raises RuntimeError, PyTorch's own, where one element of the storage would be written more than once.
        """
        s = tensor._s
        v = tensor._v
        if v is None:
            self.assign(s, vid)
            return
        # From the tensor's own view towards the storage: what a view shows is put into its base, and that is
        # what the base shows. At the end each view of the chain knows its new value, and needs no replay.
        shown: list[tuple[View, int]] = []
        while v is not None:
            parent = v.parent
            base_meta = parent.meta if parent is not None else s.meta
            put = v.plan.put_plan(v.meta, base_meta)
            if put is None or (shown and put.rule.overlaps):  # type: ignore[union-attr]
                self._write_strided(tensor, shown[0][1] if shown else vid)
                return
            base = self.read_view(parent, s) if parent is not None else self._storage_value(s)
            shown.append((v, vid))
            key = (put.number, base, vid, *v.tail)
            entry = self._known(key) or self._append(key, put, base_meta.as_tuple)
            vid = entry.first
            v = parent
        self.assign(s, vid)
        for v, seen in shown:
            v.vid = seen
            v.epoch = self.epoch
            v.version = s.version

    def write_each(self, tensors: Sequence[XLATensor], first: int) -> None:
        """``write`` for many: the values from ``first`` on, one for each of ``tensors``."""
        epoch = self.epoch
        for vid, tensor in enumerate(tensors, first):
            s = tensor._s
            if tensor._v is None and s.epoch == epoch:
                s.version += 1  # as ``assign``, without its call: optimizers write thousands
                s.buffer = None
                s.vid = vid
            else:
                self.write(tensor, vid)

    def _write_strided(self, tensor: XLATensor, vid: int) -> None:
        """Write through a chain of views in which one (``expand``, ``unfold``) repeats elements.

        One element of each may be left (``x.expand(3, 4)[0]``), which only the strides tell.
        Raises RuntimeError where PyTorch does: a stride of 0 is left.
        """
        s, v = tensor._s, tensor._v
        assert v is not None
        meta = v.meta
        if not meta.numel:
            return  # nothing is written, so nothing twice
        place = geometry(s, v, same_values=True)
        if any(size > 1 and step == 0 for size, step in zip(meta.shape, place.stride, strict=True)):
            raise RuntimeError(error_messages.MSG_OVERLAP)
        views = chain(v)
        # the last view shows other values than lie there: what is written is turned into those first
        turned = place.skipped == len(views)
        lower = v.parent if turned else views[place.skipped - 1] if place.skipped else None
        under = tensor_on(s, lower)
        base_meta = lower.meta if lower is not None else s.meta
        put = (v.plan if turned else known_plan(AS_STRIDED)).put_plan(meta, base_meta)
        if put is None:  # an expanded tensor where nothing is left to repeat
            raise RuntimeError(error_messages.MSG_OVERLAP)
        window = v.tail if turned else (meta.shape, place.stride, int, place.offset)
        key = (put.number, self.value_of(under), vid, *window)
        entry = self._known(key) or self._append(key, put, base_meta.as_tuple)
        self.write(under, entry.first)

    def _storage_value(self, s: Storage) -> int:
        if s.epoch != self.epoch:
            self.add_input(s)
        return s.vid

    def new_tensor(self, meta: TensorMeta, vid: int) -> XLATensor:
        """A tensor with a storage of its own whose value is ``vid``."""
        t = make_wrapper(XLATensor, meta.shape, dtype=meta.dtype, device=self.device)
        s = t._s = Storage(self, meta, vid, self.epoch)
        t._v = None
        self.touched.append(s)
        return t

    def from_buffer(self, buffer: Any, meta: TensorMeta) -> XLATensor:
        """A tensor on a value that is in device memory already (None: not written yet)."""
        if self.cur.depth > MAX_PENDING:
            self.flush(self)
        t = make_wrapper(XLATensor, meta.shape, dtype=meta.dtype, device=self.device)
        s = t._s = Storage(self, meta, -1, -1)
        s.buffer = buffer
        t._v = None
        if self.aside is not None:
            self.aside.made(s)
        elif self.on_new_storage is not None:
            self.on_new_storage(s)
        return t

    # -- the slow path -------------------------------------------------------------------------

    def _append_inferred(
        self, key: tuple[Any, ...], plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Entry:
        """Add an operation that never followed the current entry before."""
        cur = self.cur
        metas = plan.infer(args, kwargs)
        entry = Operation(cur, key, plan, metas, len(self.floats), len(self.ints))
        entry.line = source_location.recording_line()
        cur.add(entry)
        self.entries += 1
        return entry


def _uniform(items: Sequence[Any]) -> bool:
    """Whether a list is one float several times, and recorded as one.

    An optimizer gives a number per parameter (its bias correction), nearly always the same one.
    """
    return (
        len(items) > 1
        and type(items[0]) is float
        and items.count(items[0]) == len(items)
        and set(map(type, items)) == {float}
    )
