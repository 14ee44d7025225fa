"""Operators that tell the compiler how a value is split, and operators of manual sharding.

They are recorded like any operator. ``annotate`` and ``shard_as`` compute nothing: they are lowered to annotations
of the program, as HLO texts.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Iterator
from typing import Final

import torch

from xla_core.contract.hookspecs import OperatorRegistry
from xla_core.extension_api import shardings
from xla_core.extension_api.operators import Operand
from xla_core.extension_api.steps import Entry, Operation
from xla_spmd.lowering import dynamo
from xla_spmd.sharding.hlo_sharding import parse

# New numbers in one program for the pairs of ``shard_as``, and for the channels of collectives.
_numbers: contextvars.ContextVar[Iterator[int] | None] = contextvars.ContextVar(
    "numbers", default=None
)

# The operators stay registered as long as this object lives.
_library: Final = torch.library.Library("xla_spmd", "DEF")
_library.define("annotate(Tensor self, str sharding) -> Tensor")
_library.define("to_shard(Tensor self, str sharding) -> Tensor")
_library.define("to_whole(Tensor self, str sharding, SymInt[] shape) -> Tensor")
_library.define(
    "reduce_parts(Tensor self, str kind, int[] groups, int size, int? dim=None) -> Tensor"
)
_library.define("shard_as(Tensor a, Tensor b) -> (Tensor, Tensor)")

ANNOTATE: Final = torch.ops.xla_spmd.annotate.default
TO_SHARD: Final = torch.ops.xla_spmd.to_shard.default
TO_WHOLE: Final = torch.ops.xla_spmd.to_whole.default
REDUCE_PARTS: Final = torch.ops.xla_spmd.reduce_parts.default
SHARD_AS: Final = torch.ops.xla_spmd.shard_as.default


def _annotate_meta(self: torch.Tensor, sharding: str) -> torch.Tensor:
    return torch.empty_like(self)


def _to_shard_meta(self: torch.Tensor, sharding: str) -> torch.Tensor:
    return self.new_empty(parse(sharding).shard_shape(self.shape))


def _to_whole_meta(self: torch.Tensor, sharding: str, shape: list[int]) -> torch.Tensor:
    return self.new_empty(shape)


def _shard_as_meta(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(a), torch.empty_like(b)


def _reduce_parts_meta(
    self: torch.Tensor, kind: str, groups: list[int], size: int, dim: int | None = None
) -> torch.Tensor:
    shape = list(self.shape)
    if dim is not None:
        shape[dim] //= size
    return self.new_empty(shape)


for _name, _meta in (
    ("annotate", _annotate_meta),
    ("to_shard", _to_shard_meta),
    ("to_whole", _to_whole_meta),
    ("reduce_parts", _reduce_parts_meta),
    ("shard_as", _shard_as_meta),
):
    _library.impl(_name, _meta, "Meta")


@contextlib.contextmanager
def numbering() -> Iterator[None]:
    """Lower one program inside this context."""
    token = _numbers.set(itertools.count())
    try:
        yield
    finally:
        _numbers.reset(token)


def _next_number() -> int:
    return next(_numbers.get() or itertools.count())


def _annotate(value: Operand, sharding: str) -> Operand:
    return shardings.annotate_sharding(value, sharding)


def _shard_as(a: Operand, b: Operand) -> tuple[Operand, Operand]:
    return shardings.shard_alike(a, b, _next_number())


def _to_shard(value: Operand, sharding: str) -> Operand:
    shape = parse(sharding).shard_shape(value.shape)
    return shardings.to_manual(shardings.annotate_sharding(value, sharding), shape)


def _to_whole(value: Operand, sharding: str, shape: list[int]) -> Operand:
    return shardings.from_manual(value, sharding, tuple(shape))


def _reduce_parts(
    value: Operand, kind: str, groups: list[int], size: int, dim: int | None = None
) -> Operand:
    members = tuple(tuple(groups[i : i + size]) for i in range(0, len(groups), size))
    channel = _next_number() + 1
    if dim is None:
        return shardings.reduce_parts(value, kind, members, channel)
    return shardings.scatter_parts(value, kind, members, dim, channel)


def _dynamo(value: Operand, *description: Operand) -> Operand:
    return _annotate(value, dynamo.sharding_text(value.shape, *description))


def annotated(entry: Entry) -> str | None:
    """The HLO sharding with which an entry annotates its operand, or None if it does not annotate."""
    if not isinstance(entry, Operation):
        return None
    overload = entry.plan.overload
    if overload is ANNOTATE:
        return str(entry.args[1])
    if overload is dynamo.MARK:
        return dynamo.sharding_text(entry.args[0].meta.shape, *entry.args[1:])
    return None


def register(registry: OperatorRegistry) -> None:
    """Register the lowering rules of the operators."""
    registry.rule(ANNOTATE)(_annotate)
    registry.rule(dynamo.MARK)(_dynamo)
    # A step with one of these is lowered as one function: a region of manual sharding must begin and end in the
    # same function, and each group needs one number for the whole program.
    registry.rule(TO_SHARD, whole_step=True, in_loops="begins")(_to_shard)
    registry.rule(TO_WHOLE, whole_step=True, in_loops="ends")(_to_whole)
    registry.rule(REDUCE_PARTS, whole_step=True, in_loops="yes")(_reduce_parts)
    registry.rule(SHARD_AS, whole_step=True, in_loops="yes")(_shard_as)
