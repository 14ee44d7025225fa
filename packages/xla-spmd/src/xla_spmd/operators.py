"""Operators that tell the compiler how a value is split; they compute nothing.

Recorded like any operator, their lowering is an annotation in the program. Inside ``annotating``
HLO texts are written as the program's partitioner reads them.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from xla_core import _jax_compat
from xla_core.trace import Entry
from xla_spmd import dynamo
from xla_spmd.shardings import parse

Translate = Callable[[str, int], str]

_translate: contextvars.ContextVar[Translate | None] = contextvars.ContextVar(
    "translate", default=None
)

# Fragments stay registered as long as the object lives.
_library: Final = torch.library.Library("xla_spmd", "DEF")
_library.define("annotate(Tensor self, str sharding) -> Tensor")
_library.define("to_shard(Tensor self, str sharding) -> Tensor")
_library.define("to_whole(Tensor self, str sharding, SymInt[] shape) -> Tensor")

ANNOTATE: Final = torch.ops.xla_spmd.annotate.default
TO_SHARD: Final = torch.ops.xla_spmd.to_shard.default
TO_WHOLE: Final = torch.ops.xla_spmd.to_whole.default


def _annotate_meta(self: torch.Tensor, sharding: str) -> torch.Tensor:
    return torch.empty_like(self)


def _to_shard_meta(self: torch.Tensor, sharding: str) -> torch.Tensor:
    return self.new_empty(parse(sharding).shard_shape(self.shape))


def _to_whole_meta(self: torch.Tensor, sharding: str, shape: list[int]) -> torch.Tensor:
    return self.new_empty(shape)


for _name, _meta in (
    ("annotate", _annotate_meta),
    ("to_shard", _to_shard_meta),
    ("to_whole", _to_whole_meta),
):
    torch.library.register_fake(f"xla_spmd::{_name}", _meta, lib=_library)


@contextlib.contextmanager
def annotating(translate: Translate | None) -> Iterator[None]:
    """Lower annotations as ``translate(text, rank)`` writes them; None: as HLO text."""
    token = _translate.set(translate)
    try:
        yield
    finally:
        _translate.reset(token)


def _annotate(value: Any, sharding: str) -> Any:
    translate = _translate.get()
    text = sharding if translate is None else translate(sharding, value.ndim)
    return _jax_compat.annotate_sharding(value, text)


def _to_shard(value: Any, sharding: str) -> Any:
    shape = parse(sharding).shard_shape(value.shape)
    return _jax_compat.to_manual(_jax_compat.annotate_sharding(value, sharding), shape)


def _to_whole(value: Any, sharding: str, shape: list[int]) -> Any:
    return _jax_compat.from_manual(value, sharding, tuple(shape))


def _dynamo(value: Any, *description: Any) -> Any:
    return _annotate(value, dynamo.sharding_text(value.shape, *description))


def annotated(entry: Entry) -> str | None:
    """The HLO sharding that an operation annotates its operand with, or None if it is another one."""
    overload = entry.plan.overload if entry.plan is not None else None
    if overload is ANNOTATE:
        return str(entry.args[1])
    if overload is dynamo.MARK:
        return dynamo.sharding_text(entry.args[0].meta.shape, *entry.args[1:])
    return None


def register(registry: Any) -> None:
    """Add the lowering rules."""
    registry.rule(ANNOTATE)(_annotate)
    registry.rule(dynamo.MARK)(_dynamo)
    registry.rule(TO_SHARD)(_to_shard)
    registry.rule(TO_WHOLE)(_to_whole)
