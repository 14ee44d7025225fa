"""The lazy trace of one device: the step that is being recorded, and the tree of all steps recorded before.

Steps repeat, so every step ever recorded is kept as a path in a prefix tree: an ``Entry`` is one
operation in one position, and its children are the operations that have followed it. Recording
an operation that is in the tree takes one dictionary look-up, which gives shapes, dtypes and value
numbers. At the end of a step, the entry reached *is* the step's identity, and holds its compiled
programs. The path is the exact key of the step, not a hash of it.

``step_key`` defines how an operation is encoded as a key, ``step_values`` how its operands are numbered.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import TYPE_CHECKING

import torch

from xla_core.contract import events
from xla_core.operators import error_messages
from xla_core.operators.tensor_meta import tensor_meta
from xla_core.recording import source_location, step_key
from xla_core.recording.entry import Entry, Operation, Root
from xla_core.recording.step_key import (
    HOST_FLOAT,
    HOST_INT,
    LIFT_FLOAT,
    LIFT_INT,
    LIST,
    SAME,
    WIDE_FLOAT,
    WIDE_INT,
)
from xla_core.recording.step_record import STEP, beginning
from xla_core.recording.step_turns import Step, Turns, turn_lock
from xla_core.recording.step_values import StepValues
from xla_core.recording.storage import Backend, Loan, View
from xla_core.recording.xla_tensor import NoMetaKernelError, XLATensor
from xla_core.support import indivisible
from xla_core.torch_bridge import dtypes
from xla_core.torch_bridge.operands import NamedOperands, Operand

if TYPE_CHECKING:
    from xla_core.operators.plan import Plan

# A tree with more entries than this is dropped: a script whose steps are all different must not keep
# them all in memory. An entry takes about 1 KB, and a step of a 48-layer GPT has about 7,000.
MAX_ENTRIES: int = 500_000

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
# Numbers up to this are held by every dtype.
_SMALL = 127


class Trace(StepValues):
    """The step that one thread has recorded on one device and not yet run; ``parked`` has other threads' steps.

    ``flush`` runs what is pending, and ``backend`` transfers and compiles; the runtime passes both when it makes
    the device. ``StepState`` defines the attributes of the step and the rules under which it is recorded,
    ``StepValues`` manages the values in it.

    A thread that takes ``lock`` finds its own step here. ``bare`` is the same lock without that guarantee: a
    handler may take it if it then calls ``record``, which compares ``thread``, the number of the thread whose step
    is here.

    An exception (Ctrl-C) may occur at any bytecode. Each change of pending state is therefore a single store, made
    last, or ``indivisible``, so that anything prepared before it has no effect on its own.
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
        self._loan: weakref.ref[Loan] | None = None
        bare = threading.RLock()
        self.bare = bare
        self.lock = turn_lock(self, bare)

    def attach(self, backend: Backend) -> None:
        """Use another backend for transfers and compilation from now on. Nothing may be pending."""
        self.backend = backend

    def note_loan(self, loan: Loan) -> None:
        """Remember the loan of storages that a replayed step begins; the former one has been recalled."""
        self._loan = weakref.ref(loan)

    def recall_loan(self) -> None:
        """Give all storages that are lent their buffers."""
        loan = None if self._loan is None else self._loan()
        if loan is not None:
            loan.recall()

    def reset(self) -> None:
        """Begin a new step: nothing recorded, nothing lifted, no inputs."""
        indivisible.do(self.renewal())

    def renewal(self) -> Iterator[None]:
        """The work of ``reset``, for ``indivisible.do``. Drops a tree that has grown too large."""
        if self.entries > MAX_ENTRIES:
            events.emit(events.StepsForgotten(trace=self))
            # Captured steps and compiled graphs hold entries. Ctrl-C here leaves a smaller tree and the pending
            # step as it is; the next step drops the tree.
            self.root.clear_children()
            root = Root()
            names = (*STEP, "root", "entries")
            return indivisible.storing(self, names, (*beginning(root), root, 0))
        return indivisible.storing(self, STEP, beginning(self.root))

    def copy_at(self, last: Entry, *, inputs: int | None = None, single: bool = False) -> Trace:
        """A copy of this trace at ``last``, the end of another step, for making the program of that step.

        It has the first ``inputs`` of this step's inputs (default: all). ``single`` means that the step is one
        operator that runs as a program of its own (default: the same as in this trace).
        """
        copied = copy.copy(self)
        copied.cur = last
        copied.inputs = self.inputs[:inputs]
        copied.input_storages = self.input_storages[:inputs]
        copied.eager_flush = single or self.eager_flush
        return copied

    def detached(self) -> Trace:
        """A copy at the same entry that holds none of the step's tensors and buffers."""
        copied = self.copy_at(self.cur, inputs=0)
        copied.touched = []
        return copied

    @contextlib.contextmanager
    def undoing_reads(self, views: Sequence[View] = ()) -> Iterator[None]:
        """A block whose reads of values are undone at its end, so that they record nothing.

        ``views`` are the views that the block reads. The caller holds the lock.
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
        self.root.clear_children()
        root = Root()
        indivisible.do(indivisible.storing(self, ("root", "cur", "entries"), (root, root, 0)))

    # -- recording -----------------------------------------------------------------------------

    def record(self, plan: Plan, args: Sequence[Operand], kwargs: NamedOperands | None) -> Entry:
        """Append one operation and return its entry. The caller holds the lock.

        ``args`` and ``kwargs`` are the arguments with which PyTorch called the operator of ``plan``: tensors of
        this device, numbers, and lists of them; CPU tensors without dimensions count as numbers. Nothing is
        computed. Raises the errors of PyTorch's meta kernels for these operands, and then records nothing.
        """
        # The hottest function of all: it runs for each operator of each step. Like ``_encode_list``, it repeats
        # code of ``_encode``, ``_encode_number`` and ``value_of`` to save a call per operand.
        if self.thread != get_ident():
            self.turns.take()
        # The key describes the operation completely, so that equal keys after equal entries mean equal steps.
        # ``step_key`` documents how each kind of operand is encoded; ``step_key.read`` decodes it.
        key: list[object] = [plan.number]
        append = key.append
        epoch = self.epoch
        try:
            for a, lift in zip(args, plan.lift_mask):  # noqa: B905 - the mask may be longer
                t = type(a)
                if t is XLATensor:
                    s = a._s
                    if s.trace is not self:
                        raise error_messages.other_device(plan.name, self.device, s.trace.device)
                    # A value number is valid only in the step whose epoch stands next to it. A storage that is new
                    # to this step becomes its input; a view whose storage was written since is read again.
                    v = a._v
                    if v is None:
                        if s.epoch != epoch:
                            self.add_input(s)
                        append(s.vid)
                    elif v.epoch == epoch and v.version == s.version:
                        append(v.vid)
                    else:
                        append(self.read_view(v, s))
                elif t is float and lift and -_SMALL <= a <= _SMALL and a != 0.0 and a != 1.0:
                    append(LIFT_FLOAT)
                    self.floats.append(a)
                elif t is int and not lift:
                    append(int)
                    append(a)
                elif t is float or t is int:
                    self._encode_number(append, a, lift, args, kwargs)
                elif a is None:
                    append(None)
                elif t is list or t is tuple:
                    if not lift and a and type(a[0]) is int:
                        append(tuple(a))
                    else:
                        self._encode_list(append, a, lift, plan)
                elif t is bool:
                    append(bool)
                    append(a)
                else:
                    self._encode_other(append, a, lift, plan)
            if kwargs:
                self._encode_kwargs(append, args, kwargs, plan)
            k = tuple(key)
            # read only now: operands that became inputs have advanced it
            cur = self.cur
            entry = cur.first_child
            if entry is None or entry.key != k:
                entry = cur.other_children.get(k) or self._append_inferred(
                    k, plan, args, kwargs or {}
                )
            self.cur = entry  # this single store makes the operation part of the step
            return entry
        except BaseException:
            # Numbers lifted by an operation that was not recorded must not shift those of the next one.
            del self.floats[self.cur.floats :]
            del self.ints[self.cur.ints :]
            raise

    def _encode_kwargs(
        self,
        append: Callable[[object], None],
        args: Sequence[Operand],
        kwargs: NamedOperands,
        plan: Plan,
    ) -> None:
        for name, value in kwargs.items():
            if name in plan.storage_arguments:
                continue
            append(name)
            lift = name in plan.lift_names
            if type(value) is float or type(value) is int:
                self._encode_number(append, value, lift, args, kwargs)
            else:
                self._encode(append, value, lift, plan)

    def _encode_number(
        self,
        append: Callable[[object], None],
        a: float,
        lift: bool,
        args: Sequence[Operand] = (),
        kwargs: NamedOperands | None = None,
    ) -> None:
        """Encode a number, one that may change from step to step (``lift``) as an argument of the program.

        0 and 1 remain constants, because compilers simplify with them and they seldom change; so do ints beyond
        64 bits. ``args`` and ``kwargs`` are the operator's.
        """
        is_float = type(a) is float
        if not lift or a == 0 or a == 1 or not (is_float or _INT64_MIN <= a <= _INT64_MAX):
            # The type is part of the key, because 1 == 1.0 == True. NaN, which does not equal itself,
            # and 0.0 and -0.0, which equal each other, are encoded as text.
            append(type(a))
            append(repr(a) if is_float and (a != a or a == 0.0) else a)
            return
        held = -_SMALL <= a <= _SMALL or _is_held(a, args, kwargs)
        if isinstance(a, int):
            append(LIFT_INT if held else WIDE_INT)
            self.ints.append(a)
        else:
            append(LIFT_FLOAT if held else WIDE_FLOAT)
            self.floats.append(a)

    def _encode(self, append: Callable[[object], None], a: Operand, lift: bool, plan: Plan) -> None:
        t = type(a)
        if t is list or t is tuple:
            self._encode_list(append, a, lift, plan)
        elif isinstance(a, XLATensor):
            append(self.value_of(a, plan))
        elif t is float or t is int:
            self._encode_number(append, a, lift)
        elif a is None:
            append(None)
        else:
            self._encode_other(append, a, lift, plan)

    def _encode_list(
        self, append: Callable[[object], None], items: Sequence[Operand], lift: bool, plan: Plan
    ) -> None:
        if not items:
            append(())
            return
        first = items[0]
        if type(first) is int and not lift:
            append(
                tuple(items)
            )  # sizes and dimensions, the most frequent lists: one element of the key
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

    def _encode_other(
        self, append: Callable[[object], None], a: object, lift: bool, plan: Plan
    ) -> None:
        t = type(a)
        if t is bool or t is str:
            append(t)
            append(a)
        elif isinstance(a, XLATensor):
            append(self.value_of(a, plan))
        elif isinstance(a, torch.Tensor):
            self._encode_host_tensor(append, a, plan)
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
        self, append: Callable[[object], None], a: torch.Tensor, plan: Plan
    ) -> None:
        """Encode a CPU tensor among the operands: PyTorch accepts one without dimensions as a number."""
        if a.layout is not torch.strided and a.device == self.device:
            raise NoMetaKernelError(
                plan.name
            )  # a sparse tensor of this device: computed on the CPU
        if a.device.type == "cpu" and a.dim() and plan.copies_host_tensors():
            meta = tensor_meta(tuple(a.shape), a.dtype)
            array = self.backend.put(dtypes.to_numpy(a.detach()))
            append(self.value_of(self.from_buffer(array, meta), plan))
            return
        if a.device.type != "cpu" or a.dim() != 0:
            raise error_messages.not_an_xla_tensor(a, plan.name, self.device)
        if a.is_complex():  # too rare for a vector of lifted complex numbers
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

    # -- the slow path -------------------------------------------------------------------------

    def _append_inferred(
        self, key: tuple[object, ...], plan: Plan, args: Sequence[object], kwargs: dict[str, object]
    ) -> Entry:
        """Add an operation that has never followed the current entry before."""
        cur = self.cur
        metas = plan.infer(args, kwargs)
        entry = Operation(cur, key, plan, metas, len(self.floats), len(self.ints))
        entry.line = source_location.recording_line()
        cur.add(entry)
        self.entries += 1
        return entry


def _is_held(number: float, args: Sequence[Operand], kwargs: NamedOperands | None) -> bool:
    """Whether the dtype that an operator computes in, by its first operand, has ``number``.

    If not, PyTorch may refuse the number, so that it must not be recorded as others that it took (``Plan.infer``).
    """
    first = args[0] if args else None
    if isinstance(first, (list, tuple)) and first:
        first = first[0]
    if isinstance(first, torch.Tensor):
        return dtypes.holds(first.dtype, number)
    return dtypes.holds(kwargs.get("dtype") if kwargs else None, number)


def _uniform(items: Sequence[object]) -> bool:
    """Whether a list repeats one float, so that it is recorded as one number.

    An optimizer passes a number per parameter (its bias correction), and nearly always the same one.
    """
    return (
        len(items) > 1
        and type(items[0]) is float
        and items.count(items[0]) == len(items)
        and set(map(type, items)) == {float}
    )
