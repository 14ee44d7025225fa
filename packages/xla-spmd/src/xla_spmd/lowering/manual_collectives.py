"""Collectives between devices under manual sharding, where each device computes on its own part of a tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import torch

from xla_core.extension_api import runtime
from xla_core.extension_api.operators import handler_of
from xla_core.extension_api.tensors import XLATensor
from xla_spmd.lowering.annotation_ops import REDUCE_PARTS

REDUCTIONS: Final = ("sum", "mul", "min", "max", "and", "or")
MSG_KIND: Final = "the reduction {kind!r} is not one of {known}"
MSG_GROUPS: Final = (
    "groups={groups}: each of the {count} devices must be in exactly one group, and all groups must have "
    "one size"
)
MSG_SPLIT: Final = (
    "shard_count={count} must be the size of the groups, which have {size} devices, and must divide dimension "
    "{dim} of the part, which has shape {shape}"
)
MSG_DIMENSION: Final = (
    "Dimension out of range (expected to be in range of [{first}, {last}], but got {dim}): scatter_dim of a part "
    "of shape {shape}"
)
MSG_NO_DIMENSION: Final = "scatter_dim={dim}: the part has no dimensions, and cannot be scattered"
MSG_NOT_A_PART: Final = (
    "expected a part of a tensor, as xs.enable_manual_sharding returns, got a tensor on {device}"
)


def all_reduce(
    reduce_type: str, input: torch.Tensor, scale: float, groups: Sequence[Sequence[int]]
) -> torch.Tensor:
    """The devices' parts reduced over each group of devices, times ``scale``.

    ``reduce_type`` is one of ``REDUCTIONS``. ``input`` is a part of a tensor, as ``xs.enable_manual_sharding``
    returns, or computed from one. ``groups`` has lists of device numbers; empty, it means one group of all devices.
    Raises ValueError for an unknown reduction or groups that do not have each device once, and RuntimeError if
    ``input`` is not on an ``xla`` device.
    """
    return _record(reduce_type, input, scale, groups, None)


def reduce_scatter(
    reduce_type: str,
    input: torch.Tensor,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Each device's slice, along ``scatter_dim``, of what ``all_reduce`` with the other arguments returns.

    ``shard_count`` is the size of the groups. Raises what ``all_reduce`` raises, ValueError if ``shard_count`` is
    not that size or does not divide the dimension, and IndexError if ``input`` has no dimension ``scatter_dim``.
    """
    dim = _checked_dim(scatter_dim, tuple(input.shape))
    size = len(_checked(groups)[0])
    if shard_count != size or input.shape[dim] % size:
        shape = tuple(input.shape)
        raise ValueError(MSG_SPLIT.format(count=shard_count, size=size, dim=dim, shape=shape))
    return _record(reduce_type, input, scale, groups, dim)


def _checked_dim(dim: int, shape: tuple[int, ...]) -> int:
    rank = len(shape)
    if not rank:
        raise IndexError(MSG_NO_DIMENSION.format(dim=dim))
    if not -rank <= dim < rank:
        raise IndexError(MSG_DIMENSION.format(first=-rank, last=rank - 1, dim=dim, shape=shape))
    return dim % rank


def _record(
    kind: str,
    input: torch.Tensor,
    scale: float,
    groups: Sequence[Sequence[int]],
    dim: int | None,
) -> torch.Tensor:
    if kind not in REDUCTIONS:
        raise ValueError(MSG_KIND.format(kind=kind, known=", ".join(REDUCTIONS)))
    if not isinstance(input, XLATensor):
        raise RuntimeError(MSG_NOT_A_PART.format(device=input.device))
    members = _checked(groups)
    flat = list(itertools.chain.from_iterable(members))  # schemas have no lists of lists
    result = handler_of(REDUCE_PARTS)((input, kind, flat, len(members[0]), dim), None)
    if scale != 1.0:
        result = (result * scale).to(input.dtype)
    part: torch.Tensor = result
    return part


def _checked(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    count = len(runtime.client().devices())
    if not groups:
        return [list(range(count))]
    lists = [[int(d) for d in group] for group in groups]
    if (
        sorted(itertools.chain.from_iterable(lists)) != list(range(count))
        or len(set(map(len, lists))) > 1
    ):
        raise ValueError(MSG_GROUPS.format(groups=lists, count=count))
    return lists
