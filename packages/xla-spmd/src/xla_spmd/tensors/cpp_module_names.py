"""The functions of torch_xla's C++ module that tell of shardings."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import torch

from xla_spmd.tensors.marking import clear_sharding
from xla_spmd.tensors.sharded_tensor import (
    listed,
    local_shards,
    shard_indices,
    sharding_text,
    sharding_type,
    unwrap_sharded_tensor,
)


def _get_xla_sharding_spec(tensor: torch.Tensor) -> str:
    """The tensor's HLO sharding, or an empty text where it has none."""
    return sharding_text(unwrap_sharded_tensor(tensor))


def _get_xla_sharding_specs(tensors: Sequence[torch.Tensor]) -> list[str]:
    """``_get_xla_sharding_spec`` of each tensor."""
    return [_get_xla_sharding_spec(t) for t in tensors]


def _get_xla_sharding_type(tensor: torch.Tensor) -> int | None:
    """The number of the tensor's ``ShardingType``, or None where it has no sharding."""
    found = sharding_type(unwrap_sharded_tensor(tensor))
    return None if found is None else int(found)


def _xla_clear_sharding(tensor: torch.Tensor) -> None:
    """``clear_sharding``."""
    clear_sharding(tensor)


def _get_local_shards(tensors: Sequence[torch.Tensor]) -> list[list[tuple[torch.Tensor, str]]]:
    """Per tensor, the parts that this process holds and the names of their devices."""
    found = [local_shards(unwrap_sharded_tensor(t)) for t in tensors]
    return [[(shard.data, shard.shard_device) for shard in shards] for shards in found]


def _get_local_shard_replica_and_indices(
    tensors: Sequence[Any],
) -> list[list[tuple[int, Sequence[slice] | EllipsisType]]]:
    """Per tensor and part, the copy's number and where the part belongs."""
    found = [shard_indices(unwrap_sharded_tensor(t)) for t in tensors]
    return [[(copy, listed(indices)) for _, indices, copy in parts] for parts in found]
