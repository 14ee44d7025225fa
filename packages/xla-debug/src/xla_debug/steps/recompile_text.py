"""Describes a difference between two steps for the user: cause, line, values before and after, advice."""

from __future__ import annotations

import dataclasses
import enum
import html
import os
from collections import Counter
from collections.abc import Sequence
from typing import Final

import torch

from xla_core.extension_api.programs import kept_from_varying
from xla_core.extension_api.source_location import Frame, SourceLocation
from xla_core.extension_api.steps import Entry, Lift, Operation, Ref, TensorMeta, operations_of
from xla_core.support import flags
from xla_debug.stacks import stack_frames
from xla_debug.steps.differences import Change, Difference, Kind, name_of


class Cause(enum.Enum):
    """Why a step needed a new program."""

    FIRST = "first program"
    NEW = "another computation"
    BATCH = "batch size"
    SHAPE = "shape of an input"
    DTYPE = "dtype"
    SIZE = "Python number in a shape"
    CONSTANT = "changing constant"
    MODE = "train or eval mode"
    BRANCH = "another branch"
    LOOP = "rounds of a loop"
    RETAINED = "backward through former steps"
    DATA_SIZE = "size that depends on the data"
    START = "made in the first step"
    LIST = "length of a list"
    OPTIMIZER = "optimizer state"
    GRADIENTS = "gradients that add up"
    EARLY_SYNC = "value read in the middle of a step"
    STEP_END = "step ends elsewhere"
    RESULTS = "other results are kept"
    EVICTED = "forgotten to make room"


ADVICE: Final = {
    Cause.FIRST: "nothing to do: something has to be compiled once",
    Cause.NEW: "nothing to do if it happens once; a loop that does this every step never ends compiling",
    Cause.BATCH: "keep the batch size: DataLoader(drop_last=True), or pad the last batch",
    Cause.SHAPE: "keep shapes constant: pad to one length, or to a few (buckets such as 64, 128, 256)",
    Cause.DTYPE: "convert inputs to one dtype before they go to the device",
    Cause.SIZE: "keep sizes constant, or mask instead of slicing",
    Cause.CONSTANT: "make it a tensor (torch.tensor(value, device=...)), whose value may change freely",
    Cause.LOOP: "run a fixed number of rounds and mask those that are too many (torch.where), or use while_loop of "
    "torch_xla.experimental.fori_loop, whose number of rounds may be a tensor",
    Cause.RETAINED: "cut the graph between steps (hidden = hidden.detach()), and do not give backward() "
    "retain_graph=True",
    Cause.DATA_SIZE: "keep the size constant: use torch.where(mask, x, 0) instead of x[mask], and the mask instead "
    "of the indices of its elements",
    Cause.START: "call torch_xla.sync() once before the loop: then the operations before it are a separate program",
    Cause.MODE: "one program for each mode is normal; do not switch the mode inside a loop",
    Cause.BRANCH: "each path through Python is a program; torch.where computes both in one",
    Cause.LIST: "keep the number of tensors constant: stack the list every N steps, or reduce as you go",
    Cause.OPTIMIZER: "normal once, in the first step, in which the optimizer creates its state",
    Cause.GRADIENTS: "normal once if gradients are accumulated; else call optimizer.zero_grad() in each step",
    Cause.EARLY_SYNC: "read values after torch_xla.sync(), or with xm.add_step_closure",
    Cause.STEP_END: "let every step end at the same place",
    Cause.RESULTS: "drop tensors that are not needed, so that every step keeps the same ones",
    Cause.EVICTED: "use fewer programs in turn, raise XLA_COMPILATION_CACHE_SIZE, or use the persistent cache",
}

# Operators that do not take a tensor in place of a changing number.
_ADVICE_OF_OPERATORS: Final = {
    "aten.roll": "roll with index_select: x.index_select(0, (torch.arange(n, device=...) - shift) % n), where "
    "shift is a tensor",
    "aten.select.int": "take the row with index_select(dim, torch.tensor([index], device=...)), or iterate over "
    "batches that are cut on the host",
}
MSG_KEPT_OUT: Final = (
    "no program for several lengths can be made (XLA_VARYING_SHAPES) of steps with {reasons}. Avoid them, or pad "
    "to a few lengths; docs/shapes.md says through which operators a length may vary"
)
# What follows the advice about sizes, by the value of XLA_VARYING_SHAPES (None: by default).
_SHARING: Final = {
    None: "From the fourth size on, large steps share a program; small ones do with XLA_VARYING_SHAPES=1",
    True: "From the third size on, steps share a program",
    False: "Without XLA_VARYING_SHAPES=0, steps would share a program",
}
# Causes that do not occur with programs for several sizes.
_SIZES: Final = frozenset({Cause.BATCH, Cause.SHAPE, Cause.SIZE})
_MAX_REASONS: Final = 2


def advice_for(cause: Cause) -> str:
    """The advice for a cause. For sizes, it names operators that kept steps from sharing a program."""
    if cause not in _SIZES:
        return ADVICE[cause]
    reasons = kept_from_varying()
    if not reasons:
        return f"{ADVICE[cause]}. {_SHARING[flags.VARYING_SHAPES.get()]}"
    most = sorted(reasons, key=lambda reason: -reasons[reason])[:_MAX_REASONS]
    return MSG_KEPT_OUT.format(reasons="; ".join(most))


# Operators that a module records in only one of its two modes.
_MODE_OPERATORS: Final = ("dropout", "bernoulli", "batch_norm", "rrelu")
_MODE_ARGUMENTS: Final = ("train", "training", "use_input_stats")
# The operators that backward() records for a parameter that has a gradient already.
_ADDITIONS: Final = ("aten.add.", "aten.add_.")
_MAX_NAMED: Final = 4


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The explanation why a program was made, for the user.

    ``cause`` and ``text`` say what was different, ``operator`` and ``scope`` for which operation. ``frames`` are
    the user's lines, the first of which is the one to look at. ``nearest`` is the name of the program with which
    the step was compared; the first ``position`` of its ``operations`` are equal. ``seconds`` is the time that
    compiling or loading took.
    """

    program: str
    cause: Cause
    text: str
    frames: tuple[Frame, ...]
    scope: str
    operator: str
    operations: int
    position: int
    nearest: str | None
    seconds: float = 0.0
    from_cache: bool = False

    @property
    def filename(self) -> str:
        """The file of the line to look at; empty if no line is known."""
        return self.frames[0].filename if self.frames else ""

    @property
    def line(self) -> int:
        """The line to look at; 0 if none is known."""
        return self.frames[0].line if self.frames else 0

    @property
    def advice(self) -> str:
        """The advice for this cause and operator."""
        special = _ADVICE_OF_OPERATORS.get(self.operator.removesuffix(".default"))
        return special if special and self.cause is Cause.CONSTANT else advice_for(self.cause)

    @property
    def code(self) -> str:
        """The text of the line to look at; empty if it cannot be read."""
        return stack_frames.source(self.frames[0]) if self.frames else ""

    def where(self) -> str:
        """The place to look at, as ``train.py:34 in forward``; ``(line unknown)`` if there is none."""
        if not self.frames:
            return "(line unknown)"
        first = self.frames[0]
        return f"{first.filename}:{first.line} in {first.function}"

    def report(self) -> str:
        """The whole explanation, as several lines."""
        source = "loaded from the persistent cache" if self.from_cache else "compiled"
        lines = [
            f"{self.program} ({self.operations} operation{'s' * (self.operations != 1)}, "
            f"{source} in {self.seconds:.2f} s): {self.cause.value}",
            f"  {self.where()}: {self.code}".rstrip(": "),
            f"  {self.text}",
        ]
        for frame in filter(_is_of_script, self.frames[1:]):
            lines.append(f"    called from {frame.filename}:{frame.line} in {frame.function}")
        if self.nearest is not None:
            lines.append(
                f"  nearest known program: {self.nearest}, equal for {self.position} operations"
            )
        lines.append(f"  advice: {self.advice}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The explanation as HTML, for a notebook."""
        first, *rest = self.report().split("\n")
        name, _, cause = first.rpartition(": ")
        body = "\n".join(line.removeprefix("  ") for line in rest)
        return (
            f"<b>{html.escape(cause)}</b> <code>{html.escape(name)}</code>"
            f'<pre style="white-space: pre-wrap">{html.escape(body)}</pre>'
        )


def _is_of_script(frame: Frame) -> bool:
    return f"-packages{os.sep}" not in frame.filename


@dataclasses.dataclass(frozen=True)
class Words:
    """The cause of a difference, its description, and the entry that it concerns."""

    cause: Cause
    text: str
    entry: Entry | None


def place_of(entry: Entry | None) -> SourceLocation | None:
    """The place where an entry was recorded, or None if it is not known."""
    where: SourceLocation | None = entry.where if entry is not None else None
    return where


def tensor_text(meta: TensorMeta | None) -> str:
    """Dtype and shape of a tensor, as ``float32[64, 10]``."""
    if meta is None:
        return "nothing"
    return f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}"


def value_text(value: object) -> str:
    """An argument of an operator, in a form for the user."""
    if isinstance(value, Ref):
        return f"a tensor {tensor_text(value.meta)}"
    if isinstance(value, Lift):
        return "a number that the program takes as an argument"
    if isinstance(value, (list, tuple)) and any(isinstance(v, Ref) for v in value):
        return f"{len(value)} tensors"
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return str(value)
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def operator_text(entry: Entry | None) -> str:
    """Operator and scope of an entry, as ``aten.addmm (Net/fc1)``; None is the end of the step."""
    if entry is None:
        return "the end of the step"
    where = place_of(entry)
    name = name_of(entry).removesuffix(".default")
    return f"{name} ({where.scope})" if where is not None and where.scope else name


def words(difference: Difference) -> Words:
    """Describe a difference for the user."""
    return _WORDS[difference.kind](difference)


def _input(difference: Difference) -> Words:
    old, new = difference.old[0].metas[0], difference.new[0].metas[0]
    assert old is not None and new is not None
    reader = difference.new_next
    lead = f"the input {tensor_text(old)} of {operator_text(reader)} is {tensor_text(new)} now"
    if old.dtype != new.dtype:
        return Words(Cause.DTYPE, f"{lead}: {old.dtype} became {new.dtype}", difference.new[0])
    if len(old.shape) != len(new.shape):
        text = f"{lead}: {len(old.shape)} dimensions became {len(new.shape)}"
        return Words(Cause.SHAPE, text, difference.new[0])
    sizes = zip(old.shape, new.shape, strict=True)
    changed = [(i, a, b) for i, (a, b) in enumerate(sizes) if a != b]
    listed = ", ".join(f"dimension {i} went from {a} to {b}" for i, a, b in changed)
    batch = len(changed) == 1 and changed[0][0] == 0 and len(old.shape) > 1
    return Words(Cause.BATCH if batch else Cause.SHAPE, f"{lead}: {listed}", difference.new[0])


def _arguments(difference: Difference) -> Words:
    old, new = difference.old[0], difference.new[0]
    if not difference.changes:
        return _other(difference)
    change = difference.changes[0]
    name = operator_text(new)
    if _is_list(change):
        text = f"{name} takes {len(change.new)} tensors instead of {len(change.old)}"
        return Words(Cause.LIST, text, new)
    lead = f"the argument {change.argument!r} of {name}"
    if isinstance(change.old, Ref) or isinstance(change.new, Ref):
        text = f"{lead} is another value: {value_text(change.new)} in place of {value_text(change.old)}"
        return Words(Cause.BRANCH, text, new)
    text = f"{lead} went from {value_text(change.old)} to {value_text(change.new)}"
    if change.argument in _MODE_ARGUMENTS:
        return Words(Cause.MODE, text, new)
    if isinstance(change.new, torch.dtype):
        return Words(Cause.DTYPE, text, new)
    if isinstance(change.old, Lift) or isinstance(change.new, Lift):
        text += "; exact 0 and 1 are compiled in"
        return Words(Cause.CONSTANT, text, new)
    return Words(Cause.SIZE if _is_size(old, new) else Cause.CONSTANT, text, new)


def _is_list(change: Change) -> bool:
    pair = (change.old, change.new)
    return all(
        isinstance(v, (list, tuple)) and any(isinstance(i, Ref) for i in v) for v in pair
    ) and len(change.old) != len(change.new)


def _is_size(old: Entry, new: Entry) -> bool:
    """Whether the changed argument affects shapes: whether the results have other shapes."""
    return [m and m.shape for m in old.metas] != [m and m.shape for m in new.metas]


def _names(entries: Sequence[Entry], besides: Sequence[Entry] = ()) -> str:
    """The names of the operators of ``entries``, without those that ``besides`` has as well."""
    counted = _operators(entries)
    if not counted:
        return f"{len(entries)} input{'s' * (len(entries) != 1)}"
    counted = counted - _operators(besides) or counted
    named = [name if n == 1 else f"{n}x {name}" for name, n in counted.most_common(_MAX_NAMED)]
    more = len(counted) - len(named)
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def _operators(entries: Sequence[Entry]) -> Counter[str]:
    return Counter(map(operator_text, operations_of(entries)))


def _first_operator(entries: Sequence[Entry]) -> Entry | None:
    return next(iter(operations_of(entries) or entries), None)


def _list_change(difference: Difference) -> Words | None:
    """The words for a list that got longer or shorter; None if the difference is another one.

    The inputs that were added or removed come before the operator that takes the list.
    """
    if operations_of((*difference.old, *difference.new)):
        return None
    old, new = difference.old_next, difference.new_next
    if not (isinstance(old, Operation) and isinstance(new, Operation)):
        return None
    if name_of(old) != name_of(new):
        return None
    pairs = [(a, b) for a, b in zip(old.args, new.args, strict=False) if isinstance(a, list)]
    for before, after in pairs:
        if isinstance(after, list) and len(before) != len(after):
            text = f"{operator_text(new)} takes {len(after)} tensors instead of {len(before)}"
            return Words(Cause.LIST, text, new)
    return None


def _other(difference: Difference) -> Words:
    listed = _list_change(difference)
    if listed is not None:
        return listed
    if _is_accumulation(difference):
        return _accumulation(difference)
    old, new = difference.old, difference.new
    subject = _first_operator(new) or difference.new_next or _first_operator(old)
    kind = _kind(difference)
    if kind is Kind.ADDED:
        text = f"added before {operator_text(difference.new_next)}: {_names(new, old)}"
    elif kind is Kind.MISSING:
        text = f"no longer there before {operator_text(difference.new_next)}: {_names(old, new)}"
        missing = _first_operator(old)
        subject = missing if isinstance(missing, Operation) else subject
    else:
        text = f"{_names(new, old)} in place of {_names(old, new)}"
    return Words(_cause_of(difference), text, subject)


def _kind(difference: Difference) -> Kind:
    """The kind of a difference. OTHER becomes ADDED or MISSING if the operators of one side contain the other's."""
    old, new = _operators(difference.old), _operators(difference.new)
    if difference.kind is Kind.OTHER and old != new:
        if old < new:
            return Kind.ADDED
        if new < old:
            return Kind.MISSING
    return difference.kind


def _cause_of(difference: Difference) -> Cause:
    involved = (*difference.old, *difference.new)
    where = [place_of(e) for e in involved]
    if any(w is not None and w.optimizer for w in where):
        return Cause.OPTIMIZER
    names = list(map(name_of, operations_of(involved)))
    if any(part in name for name in names for part in _MODE_OPERATORS):
        return Cause.MODE
    if names and all("_to_copy" in name for name in names):
        return Cause.DTYPE
    return Cause.BRANCH


def _is_accumulation(difference: Difference) -> bool:
    """Whether the only new operators add gradients to inputs of the step: to the gradients of an earlier step."""
    old, new = operations_of(difference.old), operations_of(difference.new)
    if len(difference.new) - len(new) <= len(difference.old) - len(old):
        return False
    places = map(place_of, new)
    if not all(place is not None and place.backward for place in places):
        return False
    before, after = Counter(map(name_of, old)), Counter(map(name_of, new))
    return before < after and all(name.startswith(_ADDITIONS) for name in after - before)


def _accumulation(difference: Difference) -> Words:
    text = "backward() adds to the gradients of an earlier step; the step that was recorded first had none"
    additions = (o for o in operations_of(difference.new) if name_of(o).startswith(_ADDITIONS))
    return Words(Cause.GRADIENTS, text, next(additions))


def _ends(difference: Difference) -> Words:
    text = f"the step ends before {operator_text(difference.old[0])}, with which it went on before"
    return Words(Cause.STEP_END, text, difference.old[0])


def _goes_on(difference: Difference) -> Words:
    if _is_accumulation(difference):
        return _accumulation(difference)
    text = f"the step goes on with {operator_text(difference.new[0])}, where it ended before"
    return Words(Cause.STEP_END, text, difference.new[0])


def _results(difference: Difference) -> Words:
    return Words(Cause.RESULTS, "the same operations, but other results are kept", None)


_WORDS: Final = {
    Kind.INPUT: _input,
    Kind.ARGUMENTS: _arguments,
    Kind.ADDED: _other,
    Kind.MISSING: _other,
    Kind.OTHER: _other,
    Kind.ENDS: _ends,
    Kind.GOES_ON: _goes_on,
    Kind.RESULTS: _results,
}
