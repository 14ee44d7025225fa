"""Chooses the shardings of a program's results, unless that is left to the compiler.

- A result that replaces the value of an input keeps the input's sharding. So parameters and optimizer state keep
  theirs, and a step that repeats is one program.
- A value that the user annotated gets the annotated sharding.
- The gradient of an annotated leaf gets the leaf's sharding.
- A result that element-wise operators connect to a value of the same shape gets that value's sharding: momentum
  that ``zeros_like`` created, a moment that the update combines with its parameter. ``shard_as`` connects values,
  too.

If a result is connected to values with different shardings, or to none (a loss, logits), the compiler chooses: it
propagates the shardings through the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import torch

from xla_core.extension_api.operators import Operand, schema_of
from xla_core.extension_api.steps import Entry, Operation, Ref, operations_of
from xla_spmd.lowering import annotation_ops

# Element-wise operators that torch does not tag as such: element i of the result belongs to element i of the
# operand.
_KEEPS_PLACES: Final = frozenset(
    {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "clone",
     "_to_copy", "lerp", "addcmul", "addcdiv", "copy", "bernoulli", "native_dropout"}
)  # fmt: skip
_CONFLICT: Final = "conflict"


def output_shardings(
    entries: Sequence[Entry],
    outputs: Sequence[int],
    inputs: Mapping[int, str],
    fixed: Mapping[int, str],
) -> list[str | None]:
    """The HLO sharding of each output, or None if the compiler chooses it.

    ``outputs`` are value numbers. ``inputs`` has the shardings of the inputs by value number, ``fixed`` those of
    values whose sharding is given (``{replicated}`` for a whole value).
    """
    if all(vid in fixed for vid in outputs):
        return [fixed[vid] for vid in outputs]
    return list(map(known_shardings(entries, inputs, fixed), outputs))


def known_shardings(
    entries: Sequence[Entry], inputs: Mapping[int, str], fixed: Mapping[int, str]
) -> Callable[[int], str | None]:
    """A function from value numbers to HLO shardings, None where one does not follow from those that are given.

    ``inputs`` and ``fixed`` are as in ``output_shardings``.
    """
    groups = _Groups()
    for operation in operations_of(entries):
        _connect(groups, operation)
    shardings: dict[int, str] = {}
    for vid, sharding in [*inputs.items(), *fixed.items()]:
        root = groups.find(vid)
        shardings[root] = sharding if shardings.get(root, sharding) == sharding else _CONFLICT

    def known(vid: int) -> str | None:
        sharding = fixed.get(vid) or shardings.get(groups.find(vid))
        return None if sharding == _CONFLICT else sharding

    return known


def annotated(entries: Iterable[Entry]) -> dict[int, str]:
    """The HLO shardings of the values that the user annotated in the step, by value number."""
    shardings = ((entry.first, annotation_ops.annotated(entry)) for entry in entries)
    return {vid: text for vid, text in shardings if text is not None}


class _Groups:
    """Groups of values that are split in the same way (a union-find forest)."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}

    def find(self, vid: int) -> int:
        parents = self.parents
        while (parent := parents.get(vid, vid)) != vid:
            parents[vid] = parents.get(parent, parent)
            vid = parent
        return vid

    def join(self, a: int, b: int) -> None:
        self.parents[self.find(a)] = self.find(b)


def _connect(groups: _Groups, entry: Operation) -> None:
    """Join the groups of the values that an operation connects."""
    plan = entry.plan
    if plan.is_put:  # a write through a view: its operands have different shapes
        return
    name = schema_of(plan.overload).name.partition("::")[2].rstrip("_")
    if name.startswith(("_foreach_", "_fused_")):
        for vid, ref in _by_element(entry):
            groups.join(vid, ref.vid)
    elif plan.overload is annotation_ops.SHARD_AS:
        for vid in (entry.first, entry.first + 1):
            for ref in entry.args:
                groups.join(vid, ref.vid)
    elif name in _KEEPS_PLACES or torch.Tag.pointwise in plan.overload.tags:
        for ref in (a for a in _flat(entry.args) if isinstance(a, Ref)):
            for i, meta in enumerate(entry.metas):
                if meta is not None and meta.shape == ref.meta.shape:
                    groups.join(entry.first + i, ref.vid)


def _by_element(entry: Operation) -> Iterator[tuple[int, Ref]]:
    """Pairs of a result and an operand of a list operator that have the same index in their lists."""
    lists = [a for a in (*entry.args, *entry.kwargs.values()) if _is_list_of_values(a)]
    if not lists:
        return
    length = len(lists[0])
    for i, meta in enumerate(entry.metas):
        for values in lists:
            ref = values[i % length] if len(values) == length else None
            if isinstance(ref, Ref) and meta is not None and ref.meta.shape == meta.shape:
                yield entry.first + i, ref


def _is_list_of_values(a: Operand) -> bool:
    return isinstance(a, (list, tuple)) and any(isinstance(item, Ref) for item in a)


def _flat(a: Operand) -> Iterator[object]:
    if isinstance(a, (list, tuple)):
        for item in a:
            yield from _flat(item)
    else:
        yield a
