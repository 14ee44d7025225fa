"""Which sharding each result of a program gets, where that is not left to the compiler.

A result that takes over the storage of an input lies as that input did: parameters and optimizer
state keep their shardings, and a step that repeats is one program. Where the user annotated a value,
as annotated. The gradient of a sharded leaf lies as the leaf. What element-wise operators connect
to a value of its shape whose sharding is known lies like it: momentum made by ``zeros_like``, a
moment that the update combines with its parameter. So does what ``shard_as`` is told of. Two different
answers are none, and left to the compiler, like everything else (a loss, logits): it propagates the
shardings through the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import torch

from xla_core.extension_api.operators import Operand, schema_of
from xla_core.extension_api.steps import Entry, Operation, Ref, operations_of
from xla_spmd.lowering import annotation_ops

# Operators that give each element of their result the place of one of an operand, beside those
# that torch itself tags as element-wise.
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
    """A canonical HLO sharding per output, or None where the compiler chooses.

    ``inputs`` are the shardings of inputs by value number, ``fixed`` those of outputs that are
    decided already, ``{replicated}`` where a value is whole.
    """
    if all(vid in fixed for vid in outputs):
        return [fixed[vid] for vid in outputs]
    groups = _Groups()
    for operation in operations_of(entries):
        _connect(groups, operation)
    shardings: dict[int, str] = {}
    for vid, sharding in [*inputs.items(), *fixed.items()]:
        root = groups.find(vid)
        shardings[root] = sharding if shardings.get(root, sharding) == sharding else _CONFLICT
    propagated = [fixed.get(vid) or shardings.get(groups.find(vid)) for vid in outputs]
    return [None if sharding == _CONFLICT else sharding for sharding in propagated]


def annotated(entries: Iterable[Entry]) -> dict[int, str]:
    """The values that the user annotated, with their shardings."""
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
    plan = entry.plan
    if plan.is_put:
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
    """Results and operands of a list operator that stand at the same place of their lists."""
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
