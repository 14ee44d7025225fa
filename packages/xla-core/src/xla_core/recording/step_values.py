"""The values of a step: the number that each has, what a read and a write record, and inputs.

Values are numbered in program order. A storage that a step meets becomes an input of it; a view replays its
chain when its storage was written to, and writes walk the chain back. What these record beside the user's
operators (zeros for unwritten tensors, strided writes) has plans that the dispatcher gives when it is loaded.
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
from xla_core.recording.storage import Backend, Storage, View, chain, raise_if_poisoned
from xla_core.recording.xla_tensor import XLATensor, tensor_on
from xla_core.support import indivisible
from xla_core.torch_bridge.torch_private import make_wrapper

# A loop that never syncs would hold the inputs of all its iterations: longer than this, the
# trace is run when the next tensor arrives from the host.
MAX_PENDING: Final = 100_000

ZEROS: Final = "zeros"
AS_STRIDED: Final = "as_strided"
_plans: dict[str, Plan] = {}

_VALUE: Final = ("vid", "buffer", "epoch")


def known_plan(name: str) -> Plan:
    """The plan given under ``name``. Raises RuntimeError before there is one."""
    plan = _plans.get(name)
    if plan is None:
        raise RuntimeError("xla_core.dispatch has not been imported")
    return plan


def set_plan(name: str, plan: Plan) -> None:
    """Give a plan that the trace itself needs.

    ``ZEROS``: with ``aten.zeros`` unwritten tensors come to life when read. ``AS_STRIDED``: through
    ``aten.as_strided`` it writes to what no chain of simpler writes reaches.
    """
    _plans[name] = plan


class StepValues(StepState):
    """The part of a ``Trace`` that knows which number each value has in the step that is recorded.

    The attributes are those of ``Trace``. The caller of each method holds the trace's lock.
    """

    device: torch.device
    backend: Backend
    parked: dict[int, Step]
    turns: Turns

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
        # One object for all inputs of this shape and dtype: comparing it touches no memory of the entry's own.
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

    def _known(self, key: object) -> Entry | None:
        """Go on to the operation with this key, if it once followed here."""
        entry = self.cur.first_child
        if entry is None or entry.key != key:
            entry = self.cur.other_children.get(key)
            if entry is None:
                return None
        self.cur = entry
        return entry

    def _append(self, key: object, plan: Plan, metas: tuple[TensorMeta, ...]) -> Entry:
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
        t = make_wrapper(XLATensor, meta.shape, None, None, None, meta.dtype, strided, self.device)
        s = t._s = Storage(self, meta, vid, self.epoch)
        t._v = None
        self.touched.append(s)
        return t

    def from_buffer(self, buffer: object, meta: TensorMeta) -> XLATensor:
        """A tensor on a value that is in device memory already (None: not written yet)."""
        if self.cur.depth > MAX_PENDING:
            self.flush(self)
        t = make_wrapper(XLATensor, meta.shape, None, None, None, meta.dtype, strided, self.device)
        s = t._s = Storage(self, meta, -1, -1)
        s.buffer = buffer
        t._v = None
        if self.aside is not None:
            self.aside.made(s)
        elif self.on_new_storage is not None:
            self.on_new_storage(s)
        return t
