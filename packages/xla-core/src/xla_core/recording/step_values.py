"""The values of a step: their numbers, the step's inputs, and what reads and writes record.

Values are numbered in program order. A storage that a step reads for the first time becomes its input. A view
replays its chain after its storage was written to, and a write to a view walks the chain backwards. Some operations
are recorded in addition to the user's (zeros for unwritten tensors, strided writes); the dispatcher provides their
plans when it is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import strided

from xla_core.operators import error_messages
from xla_core.operators.plan import Plan
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Entry, Input, Operation
from xla_core.recording.geometry import geometry
from xla_core.recording.step_record import StepState
from xla_core.recording.step_turns import Step, Turns
from xla_core.recording.storage import Backend, HeldBuffer, Storage, View, chain, raise_if_poisoned
from xla_core.recording.xla_tensor import XLATensor, tensor_on
from xla_core.support import indivisible
from xla_core.torch_bridge.operands import Operands
from xla_core.torch_bridge.torch_private import make_wrapper

# A loop that never syncs would hold the inputs of all its iterations. A step that is longer than this
# is run when the next tensor arrives from the host.
MAX_PENDING: Final = 100_000

ZEROS: Final = "zeros"
AS_STRIDED: Final = "as_strided"
_plans: dict[str, Plan] = {}

_VALUE: Final = ("vid", "buffer", "epoch")


def known_plan(name: str) -> Plan:
    """The plan that was registered as ``name``. Raises RuntimeError if there is none yet."""
    plan = _plans.get(name)
    if plan is None:
        raise RuntimeError("xla_core.dispatch has not been imported")
    return plan


def set_plan(name: str, plan: Plan) -> None:
    """Register a plan that the trace itself needs.

    ``ZEROS`` is the plan of ``aten.zeros``, which gives unwritten tensors a value when they are read.
    ``AS_STRIDED`` is that of ``aten.as_strided``, for writes that no chain of simpler writes can express.
    """
    _plans[name] = plan


class StepValues(StepState):
    """The part of a ``Trace`` that manages the numbers of values in the step that is being recorded.

    The attributes are those of ``Trace``. The caller of each method holds the trace's lock.
    """

    device: torch.device
    backend: Backend
    parked: dict[int, Step]
    turns: Turns

    def is_pending(self, s: Storage) -> bool:
        """Whether the value of ``s`` is computed by a step that has not run, of this thread or another."""
        return s.buffer is None and (s.epoch == self.epoch or s.epoch in self.parked)

    def compute(self, s: Storage, reading: bool = False) -> None:
        """Run the step in which the value of ``s`` is pending, if it is."""
        if s.buffer is None:
            if s.epoch == self.epoch:
                self.flush(self, reading)
            elif s.epoch in self.parked:
                self.turns.run(s.epoch, reading)

    def value_of(self, tensor: XLATensor, plan: Plan | None = None) -> int:
        """The number of ``tensor``'s current value in this step; makes it an input of the step if necessary.

        ``plan`` is that of the operator that reads it, for the error message (default: a read). Raises RuntimeError
        for a tensor of another device, and for a poisoned value.
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
        """Make a materialised storage an input of this step, which gives ``s`` a value number.

        An unwritten storage becomes zeros. Raises RuntimeError for a poisoned storage.
        """
        if self.body_recorder is not None:
            self.body_recorder.note_input(s)
        elif self.parked and self.turns.prepare_input(s):
            return
        buffer = s.buffer
        if buffer is None:
            raise_if_poisoned(s)
            self._materialise_empty(s)
            return
        # A key that all inputs of this shape and dtype share: comparing it reads no memory of the entry.
        key = s.meta.index
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
            if self.cur is cur:  # it did not become an input: the next one takes its slot
                self.input_vids.pop(cur.end, None)
                del inputs[slot:], self.input_storages[slot:]
            raise
        # The epoch comes last: if an exception occurs before, the storage merely becomes an input once more.
        s.vid = vid
        s.epoch = self.epoch

    def _materialise_empty(self, s: Storage) -> None:
        # not through record(): the operation that is being recorded may already have lifted numbers
        zeros = known_plan(ZEROS)
        key = (zeros.number, s.meta.shape, "dtype", s.meta.dtype)
        entry = self._known(key) or self._append(key, zeros, s.meta.as_tuple)
        self.touched.append(s)
        s.vid = entry.first
        s.epoch = self.epoch

    def read_view(self, v: View, s: Storage) -> int:
        """The number of a view's current value; replays those views of the chain that are out of date.

        ``s`` is the storage of ``v``. Replayed views are recorded as operations of this step.
        """
        if v.epoch == self.epoch and v.version == s.version:
            return v.vid
        if self.parked:
            known = self.turns.known_view(v, s)
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

    def _known(self, key: object) -> Entry | None:
        """Advance to the operation with this key, if it has followed the current entry before."""
        entry = self.cur.first_child
        if entry is None or entry.key != key:
            entry = self.cur.other_children.get(key)
            if entry is None:
                return None
        self.cur = entry
        return entry

    def _append(self, key: Operands, plan: Plan, metas: tuple[TensorMeta, ...]) -> Entry:
        """Advance to a new operation whose results are known."""
        cur = self.cur
        entry = self.cur = self._follow(Operation(cur, key, plan, metas, cur.floats, cur.ints))
        return entry

    def _follow(self, entry: Entry) -> Entry:
        """Add ``entry`` to the tree as a child of the current one, and return it."""
        self.cur.add(entry)
        self.entries += 1
        return entry

    def assign(self, s: Storage, vid: int) -> None:
        """Make value ``vid`` of this step the storage's whole value."""
        # before the value: views may become out of date too early, but never too late
        s.version += 1
        if s.epoch == self.epoch:
            # The step's inputs still hold the buffer; without another reference they may donate it. If an
            # input is assigned its own value again, it gets its buffer back when the step runs.
            s.buffer = None
            s.vid = vid
        else:
            self.touched.append(s)
            changed = indivisible.storing(s, _VALUE, (vid, None, self.epoch))
            indivisible.do(changed)

    def write(self, tensor: XLATensor, vid: int) -> None:
        """Make value ``vid`` of this step the value of ``tensor``, by writing through its views to the storage.

        Raises PyTorch's RuntimeError if an element of the storage would be written more than once.
        """
        s = tensor._s
        v = tensor._v
        if v is None:
            self.assign(s, vid)
            return
        # From the tensor's view towards the storage: the new value of a view is put into its base, which gives
        # the new value of the base. Finally each view of the chain gets its new value, and needs no replay.
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
                s.version += 1  # the same as ``assign``, without a call: optimizers write thousands
                s.buffer = None
                s.vid = vid
            else:
                self.write(tensor, vid)

    def _write_strided(self, tensor: XLATensor, vid: int) -> None:
        """Write through a chain of views one of which (``expand``, ``unfold``) repeats elements.

        A later view may select one of the repetitions (``x.expand(3, 4)[0]``), which only the strides show.
        Raises RuntimeError like PyTorch if a stride of 0 remains.
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
        # If the last view itself changes values (another dtype, a conjugate), its own rule writes through it;
        # otherwise the new value is written with strides into the base of the view.
        changes_values = place.skipped == len(views)
        lower = v.parent if changes_values else views[place.skipped - 1] if place.skipped else None
        base = tensor_on(s, lower)
        base_meta = lower.meta if lower is not None else s.meta
        put = (v.plan if changes_values else known_plan(AS_STRIDED)).put_plan(meta, base_meta)
        if put is None:  # an expanded tensor in which nothing is repeated any longer
            raise RuntimeError(error_messages.MSG_OVERLAP)
        window = v.tail if changes_values else (meta.shape, place.stride, int, place.offset)
        key = (put.number, self.value_of(base), vid, *window)
        entry = self._known(key) or self._append(key, put, base_meta.as_tuple)
        self.write(base, entry.first)

    def _storage_value(self, s: Storage) -> int:
        if s.epoch != self.epoch:
            self.add_input(s)
        return s.vid

    def new_tensor(self, meta: TensorMeta, vid: int) -> XLATensor:
        """A tensor with a new storage whose value is ``vid``."""
        t = make_wrapper(XLATensor, meta.shape, None, None, None, meta.dtype, strided, self.device)
        s = t._s = Storage(self, meta, vid, self.epoch)
        t._v = None
        self.touched.append(s)
        return t

    def from_buffer(self, buffer: HeldBuffer, meta: TensorMeta) -> XLATensor:
        """A tensor whose value is already in device memory, in ``buffer`` (None: unwritten)."""
        t = make_wrapper(XLATensor, meta.shape, None, None, None, meta.dtype, strided, self.device)
        t._s = self.holding(buffer, meta)
        t._v = None
        return t

    def holding(self, buffer: HeldBuffer, meta: TensorMeta) -> Storage:
        """The storage of such a tensor."""
        if self.cur.depth > MAX_PENDING:
            self.flush(self)
        s = Storage(self, meta, -1, -1)
        s.buffer = buffer
        if self.body_recorder is not None:
            self.body_recorder.note_created(s)
        elif self.on_new_storage is not None:
            self.on_new_storage(s)
        return s
