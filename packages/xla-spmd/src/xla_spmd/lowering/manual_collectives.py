"""Collectives over devices inside manual sharding, where each device works on the part that it holds."""

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
    "shard_count={count}: groups have {size} devices, and dimension {dim} of a part of shape {shape} has to "
    "divide by it"
)
MSG_NOT_A_PART: Final = (
    "expected a part of a tensor (xs.enable_manual_sharding gives one), got one on {device}"
)


def all_reduce(
    reduce_type: str, input: torch.Tensor, scale: float, groups: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Each device's part reduced over its group (none: all devices), times ``scale``.

    ``input`` is a part of a tensor, as ``xs.enable_manual_sharding`` gives, or computed from one. Raises
    ValueError for another reduction or groups, RuntimeError for a tensor that is on no ``xla`` device.
    """
    return _recorded(reduce_type, input, scale, groups, None)


def reduce_scatter(
    reduce_type: str,
    input: torch.Tensor,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Sequence[Sequence[int]],
) -> torch.Tensor:
    """The device's slice along ``scatter_dim`` of that reduction; ``shard_count`` is a group's size."""
    dim = scatter_dim % input.dim()
    size = len(_checked(groups)[0])
    if shard_count != size or input.shape[dim] % size:
        shape = tuple(input.shape)
        raise ValueError(MSG_SPLIT.format(count=shard_count, size=size, dim=dim, shape=shape))
    return _recorded(reduce_type, input, scale, groups, dim)


def _recorded(
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
    flat = list(itertools.chain.from_iterable(members))
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
