"""Turns a recorded step into the nodes in which repeats are searched.

Three things would hide repeats in a recorded step. They are changed here without changing what the step computes:

- An optimizer's list operators update a hundred parameters in one entry. Each becomes one node per element, and
  a series of them is reordered by element, so that the update of one parameter is one run.
- A view that crosses the border of a run would be a value of its own, and cost a copy. Views have no nodes: the
  operations that read them compute them, and constants as well.
- A slice of a program input has a different constant in every repeat (the time steps of a recurrent net). It
  counts as an input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Final

from xla_core.lowering.repeats.items import Node
from xla_core.operators.foreach import is_per_element
from xla_core.operators.lowering_registry import ViewRule
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Entry, Input, Operation, operations_of
from xla_core.recording.step_key import Lift, Ref, lifted, references
from xla_core.torch_bridge.operands import NamedOperands, Operands

# Operators that only move values, although PyTorch does not call them views.
_MOVES: Final = frozenset({"aten._unsafe_view.default", "aten.clone.default"})
# Compile costs of compound operators: the number of nodes that PyTorch would have recorded for their parts.
_WEIGHTS: Final = {
    "aten.linear_backward.default": 5.0,
    "xla.attention.default": 6.0,
    "xla.attention_backward.default": 10.0,
    "aten._thnn_fused_lstm_cell.default": 11.0,
    "aten._thnn_fused_lstm_cell_backward_impl.default": 10.0,
}
# Longer chains of views get a node, because every reader computes the whole chain.
_MAX_CHAIN: Final = 16
# Operators that use only the shapes of their operands: their results are constants.
FILLS: Final = frozenset(
    f"aten.{name}.default"
    for name in (
        "empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like",
        "zeros_like",
    )
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class OpInstance:
    """What one node computes: a whole operation (``index`` None), or one element of a list operator."""

    entry: Operation
    index: int | None = None

    def arguments(self) -> tuple[Operands, NamedOperands]:
        """The entry's arguments; with an ``index``, lists have only that element."""
        entry, index = self.entry, self.index
        if index is None:
            return entry.args, entry.kwargs
        count = _elements(entry)
        return (
            tuple(_cut(a, index, count) for a in entry.args),
            {name: _cut(a, index, count) for name, a in entry.kwargs.items()},
        )

    def results(self) -> tuple[int, ...]:
        """The numbers of the values that it computes."""
        entry, index = self.entry, self.index
        if index is None:
            return tuple(range(entry.first, entry.end))
        return tuple(range(entry.first + index, entry.end, _elements(entry)))

    def metas(self) -> tuple[TensorMeta | None, ...]:
        """The metas of ``results()``."""
        entry, index = self.entry, self.index
        return entry.metas if index is None else entry.metas[index :: _elements(entry)]


def _cut(a: object, index: int, count: int) -> object:
    # ``_splits`` has checked that lists have ``count`` elements or none; other arguments apply to all elements
    return [a[index]] if isinstance(a, list) and len(a) == count else a


def _elements(entry: Operation) -> int:
    """The number of elements of a list operator: the length of its first argument."""
    return len(entry.args[0])


def _splits(entry: Operation) -> bool:
    """Whether an entry applies one function to each element of its lists, and can be split."""
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

    ``inputs`` are value numbers in argument order. ``lazy`` maps value numbers to operations that are
    computed where they are read; ``early`` maps them to slices of inputs, which are computed first and then
    count as inputs. ``wanted`` are the values from which the step's outputs are read: the base of an output
    that is a view.
    """

    nodes: list[Node]
    inputs: list[int]
    lazy: dict[int, Operation]
    early: dict[int, Operation]
    wanted: list[int]


def most_weight(entries: Iterable[Entry]) -> float:
    """What the nodes of the graph of ``entries`` weigh at most: an operator on lists has one for each result."""
    return sum(
        _WEIGHTS.get(o.plan.name, 1.0) * max(1, o.end - o.first) for o in operations_of(entries)
    )


def build_graph(
    entries: Sequence[Entry], outputs: Sequence[int], never_repeating: Collection[str] = ()
) -> Graph:
    """The graph of ``entries``, all of which ``outputs``, the numbers of the wanted values, depend on.

    Every node of an operator named in ``never_repeating`` (default: none) gets a unique key, so that it is
    never part of a repeat.
    """
    return _Builder(entries, outputs, never_repeating).graph()


class _Builder:
    def __init__(
        self, entries: Sequence[Entry], outputs: Sequence[int], never_repeating: Collection[str]
    ) -> None:
        self.entries = entries
        self.never_repeating = never_repeating
        self.outputs = outputs
        # A view that is an output is computed in any case, and therefore gets a node.
        self.leaving = frozenset(outputs)
        self.inputs: list[int] = []
        self.given: set[int] = set()  # inputs and early values
        self.lazy: dict[int, Operation] = {}
        self.early: dict[int, Operation] = {}
        # For every lazy value: the value at the beginning of its chain of views (None for a constant), the number
        # of the chain's description, and the number of views in it.
        self.roots: dict[int, tuple[int | None, int, int]] = {}
        # The base of every view.
        self.bases: dict[int, Ref] = {}
        # Values that are passed on as a view of themselves, with that view: see ``_fold_views``.
        self.folded: dict[int, int] = {}
        # Descriptions by small numbers, so that nodes are compared by integers.
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
                    # Optimizers call several list operators one after another. In element order, the update of
                    # each parameter is one run of nodes, which repeats from parameter to parameter.
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
        """The value that a reader of ``vid`` receives: the base of its views, or the view that replaces it."""
        root = self._base(vid)
        return self.folded.get(root, root)

    def _base(self, vid: int) -> int:
        root = self.roots.get(vid)
        return vid if root is None or root[0] is None else root[0]

    def _fold_views(self, parts: Iterable[OpInstance]) -> None:
        """If all readers of a value use the same view of it, pass on the view instead of the value.

        Otherwise the value would be computed twice: for readers in the same run, whose fusion
        contains the view, and for those outside of it.
        """
        common: dict[int, list[Ref]] = {}
        for part in parts:
            args, kwargs = part.arguments()
            for ref in references((args, tuple(kwargs.values()))):
                chain = self._chain(ref)
                # the views with which the chains of all readers so far begin
                base = chain[0].vid
                known = common.setdefault(base, chain)
                if known is not chain:
                    shared = sum(1 for _ in _while_equal(known, chain))
                    common[base] = known[:shared]
        # An output is read from its base, outside any function: that reader uses no view.
        for vid in self.outputs:
            common.pop(self._base(vid), None)
        for base, chain in common.items():
            # A view that repeats elements (expand) is larger than its base, so the base is passed on. An input
            # is not made by a node.
            same_size = [r for r in chain if r.meta.numel == chain[0].meta.numel]
            if base not in self.given and len(same_size) == len(chain) > 1:
                self.folded[base] = chain[-1].vid

    def _chain(self, ref: Ref) -> list[Ref]:
        """The references from a value's base to the value, one per view."""
        chain = [ref]
        while (base := self.bases.get(chain[-1].vid)) is not None:
            chain.append(base)
        chain.reverse()
        return chain

    def _without_node(self, entry: Operation) -> bool:
        """Register a view or a constant, which needs no node; returns False for other entries."""
        plan = entry.plan
        # A lifted number changes from step to step, and a node reads it as an operand: it is not a constant.
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
            # A part of a value is smaller than the value, so it gets a node and is passed on. A part of an input
            # is cut out at the beginning instead: x[0], x[1], ... of an unrolled loop differ in a constant, but
            # as inputs they are just different operands of equal nodes.
            if root is not None and (root in self.given):
                self.early[entry.first] = entry
                self.given.add(entry.first)
                return True
            return False
        if entry.first in self.leaving:
            return False  # it is computed in any case
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
        # Nodes with equal keys must lower to equal code for any operands. So the key contains everything but
        # the values and the lifted numbers that the operation reads.
        what = (plan, part.index is None, metas, folds, unique)
        key = self._describe((what, self._frozen(args), self._frozen(named)))
        # each reader makes its constants itself, so they are not operands
        operands = tuple(
            self._root(ref.vid)
            for ref in references(every)
            if self.roots.get(ref.vid, (0,))[0] is not None
        )
        shown = tuple(self.folded.get(v, v) for v in results)
        return Node(key, (*operands, *lifts), shown, _WEIGHTS.get(plan.name, 1.0), part)

    def _frozen(self, a: object) -> Hashable:
        """An argument without the values it refers to: metas, view chains, kinds of scalars.

        For a view chain, this includes the part of it that is folded into the value that is passed on, because
        the reader computes the rest.
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
    """Consecutive list operators over the same number of elements, in which no element reads another one."""

    def __init__(self) -> None:
        self.entries: list[Operation] = []
        self.element_of: dict[int, int] = {}

    def takes(self, entry: Operation, root: Callable[[int], int]) -> bool:
        """Whether ``entry`` may be added: none of its elements reads what the series computes for another."""
        # In element order, all operations of element 0 come first. They must not need values of other elements,
        # and no operand that all elements share may come from the series.
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
            # an operator with several results returns one list after another
            self.element_of[entry.first + offset] = offset % count

    def drain(self) -> list[OpInstance]:
        """Remove and return all operations, element by element."""
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
    """The number of a lifted scalar among the operands of nodes, below zero.

    Like values, scalars differ between the calls of a function, but their numbers must not collide with those of
    values.
    """
    return -1 - (2 * lift.position + lift.is_float)


def lifted_slot(number: int) -> tuple[bool, int]:
    """Whether the scalar is a float, and its position in the step's vector of floats or ints."""
    position, is_float = divmod(-1 - number, 2)
    return bool(is_float), position
