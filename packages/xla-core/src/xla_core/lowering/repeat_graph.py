"""A recorded step as nodes to look for repeats in: list operators by element, views in their readers.

Three things hide repeats in a recorded step, and are changed here without changing what it computes.
An optimizer's list operators do a hundred parameters in one entry: each becomes one node per element,
and a series of them is put in element order, so that one parameter's update is one run. Views would
be values of their own wherever a run begins or ends, and cost a copy: they are left out, and
computed by whoever reads them (as are constants). A slice of a program input has another constant
in every repeat (the time steps of a recurrent net): it counts as an input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final

from xla_core.lowering.repeats.items import Node
from xla_core.operators.foreach import is_per_element
from xla_core.operators.lowering_registry import ViewRule
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Entry, Input, Operation
from xla_core.recording.step_key import Lift, Ref, lifted, references

# Operators that move values without computing, though PyTorch does not call them views.
_MOVES: Final = frozenset({"aten._unsafe_view.default", "aten.clone.default"})
# What whole operators cost to compile: as many nodes as PyTorch would have recorded for their parts.
_WEIGHTS: Final = {
    "aten.linear_backward.default": 5.0,
    "xla.attention.default": 6.0,
    "xla.attention_backward.default": 10.0,
    "aten._thnn_fused_lstm_cell.default": 11.0,
    "aten._thnn_fused_lstm_cell_backward_impl.default": 10.0,
}
# Longer chains of views are cut, as every reader computes a chain again.
_MAX_CHAIN: Final = 16
# Operators that look at the shapes of their operands only: constants.
FILLS: Final = frozenset(
    f"aten.{name}.default"
    for name in (
        "empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like",
        "zeros_like",
    )
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class OpInstance:
    """What one node computes: an operation, or one element of a list operator's.

    ``index`` is the number of the element; None is the whole operation.
    """

    entry: Operation
    index: int | None = None

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The entry's arguments, lists cut to the one element."""
        entry, index = self.entry, self.index
        if index is None:
            return entry.args, entry.kwargs
        count = _elements(entry)
        return (
            tuple(_cut(a, index, count) for a in entry.args),
            {name: _cut(a, index, count) for name, a in entry.kwargs.items()},
        )

    def results(self) -> tuple[int, ...]:
        """The value numbers it computes."""
        entry, index = self.entry, self.index
        if index is None:
            return tuple(range(entry.first, entry.end))
        return tuple(range(entry.first + index, entry.end, _elements(entry)))

    def metas(self) -> tuple[TensorMeta | None, ...]:
        """The metas of ``results()``."""
        entry, index = self.entry, self.index
        return entry.metas if index is None else entry.metas[index :: _elements(entry)]


def _cut(a: object, index: int, count: int) -> object:
    # ``_splits`` made sure that lists have ``count`` elements or none; what is no list is for all elements
    return [a[index]] if isinstance(a, list) and len(a) == count else a


def _elements(entry: Operation) -> int:
    """How many elements a list operator has, from its first argument."""
    return len(entry.args[0])


def _splits(entry: Operation) -> bool:
    """Whether an entry applies one function to each element of its lists."""
    if not is_per_element(entry.plan.name) or not entry.args:
        return False
    count = len(entry.args[0]) if isinstance(entry.args[0], list) else 0
    if count < 2 or len(entry.metas) % count:
        return False
    every = (*entry.args, *entry.kwargs.values())
    return all(len(a) in (0, count) for a in every if isinstance(a, list))


@dataclasses.dataclass(slots=True)
class Graph:
    """A step as nodes, in an order in which they can be computed.

    ``inputs`` are value numbers in argument order. ``lazy`` operations, by the number of their value, are
    computed where they are read; ``early`` ones (slices of inputs) at the top, and then they are values like
    inputs. ``wanted`` are the values that the step's outputs are read from: their bases, where an output is a
    view.
    """

    nodes: list[Node]
    inputs: list[int]
    lazy: dict[int, Operation]
    early: dict[int, Operation]
    wanted: list[int]


def build_graph(
    entries: Sequence[Entry], outputs: Sequence[int], never_repeating: Collection[str] = ()
) -> Graph:
    """The graph of ``entries``, which are all needed for ``outputs``, the numbers of the wanted values.

    Every node of an operator named in ``never_repeating`` (default: none) has a key of its own, so that it is
    in no repeat.
    """
    return _Builder(entries, outputs, never_repeating).graph()


class _Builder:
    def __init__(
        self, entries: Sequence[Entry], outputs: Sequence[int], never_repeating: Collection[str]
    ) -> None:
        self.entries = entries
        self.never_repeating = never_repeating
        self.outputs = outputs
        # A view that leaves the program is computed anyway: best where its base is.
        self.leaving = frozenset(outputs)
        self.inputs: list[int] = []
        self.given: set[int] = set()
        self.lazy: dict[int, Operation] = {}
        self.early: dict[int, Operation] = {}
        # For every lazy value: the value that its chain of views begins with (None for a constant), the number
        # that stands for what the chain does, and how many views it has.
        self.roots: dict[int, tuple[int | None, int, int]] = {}
        # For every view: what it is a view of.
        self.bases: dict[int, Ref] = {}
        # Values that are handed over as a view of themselves, and that view: see ``_fold_views``.
        self.folded: dict[int, int] = {}
        # Small numbers for descriptions: comparing nodes is comparing integers from then on.
        self.described: dict[Hashable, int] = {}

    def graph(self) -> Graph:
        parts: list[OpInstance] = []
        series = _Series()
        for entry in self.entries:
            if isinstance(entry, Input):
                self.inputs.append(entry.first)
                self.given.add(entry.first)
            elif isinstance(entry, Operation) and not self._without_node(entry):
                if _splits(entry):
                    # Optimizers call several list operators in a row. Element order makes each parameter's
                    # update one run of nodes, which repeats from parameter to parameter.
                    if not series.takes(entry, self._root):
                        parts += series.drain()
                    series.add(entry)
                else:
                    parts += series.drain()
                    parts.append(OpInstance(entry))
        parts += series.drain()
        self._fold_views(parts)
        nodes = [self._node(part) for part in parts]
        return Graph(
            nodes, self.inputs, self.lazy, self.early, [self._root(v) for v in self.outputs]
        )

    def _root(self, vid: int) -> int:
        """The value that a reader of ``vid`` takes: the base of its views, or what that folds to."""
        root = self._base(vid)
        return self.folded.get(root, root)

    def _base(self, vid: int) -> int:
        root = self.roots.get(vid)
        return vid if root is None or root[0] is None else root[0]

    def _fold_views(self, parts: Iterable[OpInstance]) -> None:
        """Where all readers look through one view, the view is the value, not its base.

        Handed over as its base it would be computed twice: for the readers at hand, whose fusion
        contains the view, and for those elsewhere.
        """
        common: dict[int, list[Ref]] = {}
        for part in parts:
            args, kwargs = part.arguments()
            for ref in references((args, tuple(kwargs.values()))):
                chain = self._chain(ref)
                # what all readers so far look through: the views that their chains begin with alike
                base = chain[0].vid
                known = common.setdefault(base, chain)
                if known is not chain:
                    shared = sum(1 for _ in _while_equal(known, chain))
                    common[base] = known[:shared]
        # An output is read from its base, outside of any function: that reader looks through nothing.
        for vid in self.outputs:
            common.pop(self._base(vid), None)
        for base, chain in common.items():
            # A view that repeats elements (expand) would be more to hand over than its base; an input is
            # there as it is, and no node makes it.
            same_size = [r for r in chain if r.meta.numel == chain[0].meta.numel]
            if base not in self.given and len(same_size) == len(chain) > 1:
                self.folded[base] = chain[-1].vid

    def _chain(self, ref: Ref) -> list[Ref]:
        """The views from a value's base to the value."""
        chain = [ref]
        while (base := self.bases.get(chain[-1].vid)) is not None:
            chain.append(base)
        chain.reverse()
        return chain

    def _without_node(self, entry: Operation) -> bool:
        """File views and constants, which get no node."""
        plan = entry.plan
        # A lifted number differs from step to step, and a node reads it as an operand: no constant.
        refs = list(entry.references())
        if len(entry.metas) != 1 or any(entry.lifted()):
            return False
        view = isinstance(plan.rule, ViewRule) and not plan.is_put
        if not refs or plan.name in FILLS:
            return self._file_lazy(entry, None, None, 0)
        if len(refs) != 1 or not (view or plan.name in _MOVES):
            return False
        base = refs[0]
        root, _, length = self.roots.get(base.vid, (base.vid, 0, 0))
        meta = entry.metas[0]
        assert meta is not None
        if meta.numel < base.meta.numel:
            # A part of a value is less to hand over than the value, and gets a node. A part of an input is
            # cut out at the top instead: x[0], x[1], ... of an unrolled loop differ in a constant, and as
            # inputs they are just other operands of equal nodes.
            if root is not None and (root in self.given):
                self.early[entry.first] = entry
                self.given.add(entry.first)
                return True
            return False
        if entry.first in self.leaving:
            return False  # it is computed as a value of its own in any case
        return length < _MAX_CHAIN and self._file_lazy(entry, base, root, length + 1)

    def _file_lazy(self, entry: Operation, base: Ref | None, root: int | None, length: int) -> bool:
        described = self._describe(
            (entry.plan, self._frozen(entry.args), self._frozen(tuple(entry.kwargs.items())))
        )
        self.lazy[entry.first] = entry
        if base is not None:
            self.bases[entry.first] = base
        self.roots[entry.first] = (root, described, length)
        return True

    def _chain_of(self, vid: int) -> int:
        """The description of the views from a value's base to the value; 0 for a base itself."""
        return self.roots.get(vid, (0, 0, 0))[1]

    def _describe(self, key: Hashable) -> int:
        return self.described.setdefault(key, len(self.described) + 1)

    def _node(self, part: OpInstance) -> Node:
        args, kwargs = part.arguments()
        named = tuple(kwargs.items())
        metas = part.metas()
        every = (args, tuple(kwargs.values()))
        lifts = tuple(map(lift_number, lifted(every)))
        results = part.results()
        folds = tuple(self._chain_of(self.folded[v]) if v in self.folded else 0 for v in results)
        plan = part.entry.plan
        unique = results if plan.name in self.never_repeating else None
        # Equal keys must lower to equal code, given operands of any names: all of the operation but which values
        # and which lifted numbers it reads.
        what = (plan, part.index is None, metas, folds, unique)
        key = self._describe((what, self._frozen(args), self._frozen(named)))
        # constants are made by each reader, so they are no operands
        operands = tuple(
            self._root(ref.vid)
            for ref in references(every)
            if self.roots.get(ref.vid, (0,))[0] is not None
        )
        shown = tuple(self.folded.get(v, v) for v in results)
        return Node(key, (*operands, *lifts), shown, _WEIGHTS.get(plan.name, 1.0), part)

    def _frozen(self, a: object) -> Hashable:
        """An argument without the values it refers to: metas, view chains, kinds of scalars.

        Of a view chain also how much of it is folded into the value that is handed over: the rest is
        left to the reader.
        """
        if isinstance(a, Ref):
            folded = self.folded.get(self._base(a.vid))
            return (a.meta, self._chain_of(a.vid), 0 if folded is None else self._chain_of(folded))
        if isinstance(a, Lift):
            return (Lift, a.is_float, type(a.example), a.example)
        if isinstance(a, (list, tuple)):
            return tuple(map(self._frozen, a))
        if isinstance(a, (bool, int, float, complex)):
            return (type(a), repr(a))
        return a


class _Series:
    """List operators in a row, over the same number of elements, each reading its own element's values."""

    def __init__(self) -> None:
        self.entries: list[Operation] = []
        self.element_of: dict[int, int] = {}

    def takes(self, entry: Operation, root: Callable[[int], int]) -> bool:
        """Whether ``entry`` may join: element i reads none of what the series computes for j."""
        # Element order computes all of element 0 first. So nothing of it may need another element's values,
        # and no operand that serves all elements may come from the series.
        if not self.entries:
            return True
        count = _elements(entry)
        if count != _elements(self.entries[0]):
            return False
        for a in (*entry.args, *entry.kwargs.values()):
            if isinstance(a, list):
                refs = ((i, r) for i, r in enumerate(a) if isinstance(r, Ref))
                if any(self.element_of.get(root(r.vid), i) != i for i, r in refs):
                    return False
            elif isinstance(a, Ref) and root(a.vid) in self.element_of:
                return False
        return True

    def add(self, entry: Operation) -> None:
        """Append an entry that ``takes`` accepted."""
        count = _elements(entry)
        self.entries.append(entry)
        for offset in range(len(entry.metas)):
            # an operator with several results gives a list of each, one after the other
            self.element_of[entry.first + offset] = offset % count

    def drain(self) -> list[OpInstance]:
        """All parts, element by element; the series is empty afterwards."""
        if not self.entries:
            return []
        count = _elements(self.entries[0])
        parts = [OpInstance(entry, i) for i in range(count) for entry in self.entries]
        self.entries = []
        self.element_of = {}
        return parts


def _while_equal(left: Sequence[Ref], right: Sequence[Ref]) -> Iterator[Ref]:
    for a, b in zip(left, right, strict=False):
        if a.vid != b.vid:
            return
        yield a


def lift_number(lift: Lift) -> int:
    """The number under which nodes have a lifted scalar among their operands: below zero.

    Scalars are renamed between the calls of a function like values are, and must not be taken for values.
    """
    return -1 - (2 * lift.position + lift.is_float)


def lifted_slot(number: int) -> tuple[bool, int]:
    """Whether the scalar is a float, and its position in the step's vector of floats or ints."""
    position, is_float = divmod(-1 - number, 2)
    return bool(is_float), position
