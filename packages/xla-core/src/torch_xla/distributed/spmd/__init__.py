"""torch_xla.distributed.spmd (xs): tensors split over a mesh of devices; from the package xla-spmd."""

from __future__ import annotations

from typing import Final

from torch_xla._packages import lazy_names

HOMES: Final = {
    "HybridMesh": "xla_spmd.mesh",
    "MarkShardingFunction": "xla_spmd.marking",
    "Mesh": "xla_spmd.mesh",
    "ShardingSpec": "xla_spmd.sharding_spec",
    "ShardingType": "xla_spmd.shardings",
    "XLAShard": "xla_spmd.sharded_tensor",
    "XLAShardedTensor": "xla_spmd.sharded_tensor",
    "clear_sharding": "xla_spmd.marking",
    "disable_manual_sharding": "xla_spmd.manual",
    "enable_manual_sharding": "xla_spmd.manual",
    "get_1d_mesh": "xla_spmd.mesh",
    "get_global_mesh": "xla_spmd.mesh",
    "mark_sharding": "xla_spmd.marking",
    "mark_sharding_with_gradients": "xla_spmd.marking",
    "set_global_mesh": "xla_spmd.mesh",
    "unwrap_sharded_tensor": "xla_spmd.sharded_tensor",
    "wrap_as_sharded_tensor": "xla_spmd.sharded_tensor",
    "wrap_if_sharded": "xla_spmd.marking",
}

__all__ = [
    "HybridMesh",
    "MarkShardingFunction",
    "Mesh",
    "ShardingSpec",
    "ShardingType",
    "XLAShard",
    "XLAShardedTensor",
    "clear_sharding",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
]

__getattr__ = lazy_names(__name__, HOMES)
