"""torch_xla.distributed.spmd (xs): tensors split over a mesh of devices; from the package xla-spmd."""

from __future__ import annotations

from typing import Final

from torch_xla._packages import lazy_names

HOMES: Final = {
    "EinsumLinear": "xla_spmd.linear",
    "HybridMesh": "xla_spmd.mesh",
    "MarkShardingFunction": "xla_spmd.marking",
    "Mesh": "xla_spmd.mesh",
    "ShardingSpec": "xla_spmd.sharding_spec",
    "ShardingType": "xla_spmd.shardings",
    "XLAPatchedLinear": "xla_spmd.linear",
    "XLAShard": "xla_spmd.sharded_tensor",
    "XLAShardedTensor": "xla_spmd.sharded_tensor",
    "annotate_custom_sharding": "xla_spmd.marking",
    "apply_backward_optimization_barrier": "xla_spmd.linear",
    "apply_xla_patch_to_nn_linear": "xla_spmd.linear",
    "auto_policy": "xla_spmd.distribute",
    "clear_sharding": "xla_spmd.marking",
    "convert_to_xla_mesh": "xla_spmd.placements",
    "convert_to_xla_partition_spec": "xla_spmd.placements",
    "disable_manual_sharding": "xla_spmd.manual",
    "enable_manual_sharding": "xla_spmd.manual",
    "get_1d_mesh": "xla_spmd.mesh",
    "get_global_mesh": "xla_spmd.mesh",
    "mark_sharding": "xla_spmd.marking",
    "mark_sharding_with_gradients": "xla_spmd.marking",
    "set_global_mesh": "xla_spmd.mesh",
    "shard_as": "xla_spmd.alike",
    "unwrap_sharded_tensor": "xla_spmd.sharded_tensor",
    "wrap_as_sharded_tensor": "xla_spmd.sharded_tensor",
    "wrap_if_sharded": "xla_spmd.marking",
    "xla_distribute_module": "xla_spmd.distribute",
    "xla_distribute_tensor": "xla_spmd.distribute",
    "xla_patched_nn_linear_forward": "xla_spmd.linear",
}

__all__ = [
    "HybridMesh",
    "MarkShardingFunction",
    "Mesh",
    "ShardingSpec",
    "ShardingType",
    "XLAShard",
    "XLAShardedTensor",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "auto_policy",
    "clear_sharding",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "shard_as",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "xla_distribute_module",
    "xla_distribute_tensor",
    "xla_patched_nn_linear_forward",
]

__getattr__, __dir__ = lazy_names(__name__, HOMES)
