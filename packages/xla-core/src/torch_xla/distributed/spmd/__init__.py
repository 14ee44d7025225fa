"""torch_xla.distributed.spmd (xs): tensors sharded over a mesh of devices; from the package xla-spmd."""

from __future__ import annotations

from typing import Final

from torch_xla._packages import lazy_names

HOMES: Final = {
    "EinsumLinear": "xla_spmd.training.linear",
    "HybridMesh": "xla_spmd.sharding.mesh",
    "MarkShardingFunction": "xla_spmd.tensors.marking",
    "Mesh": "xla_spmd.sharding.mesh",
    "ShardingSpec": "xla_spmd.tensors.input_sharding",
    "ShardingType": "xla_spmd.sharding.hlo_sharding",
    "XLAPatchedLinear": "xla_spmd.training.linear",
    "XLAShard": "xla_spmd.tensors.sharded_tensor",
    "XLAShardedTensor": "xla_spmd.tensors.sharded_tensor",
    "annotate_custom_sharding": "xla_spmd.tensors.marking",
    "apply_backward_optimization_barrier": "xla_spmd.training.linear",
    "apply_xla_patch_to_nn_linear": "xla_spmd.training.linear",
    "_mark_manual_sharding": "xla_spmd.tensors.manual_sharding",
    "auto_policy": "xla_spmd.training.distribute",
    "clear_sharding": "xla_spmd.tensors.marking",
    "convert_to_xla_mesh": "xla_spmd.sharding.dtensor_placements",
    "convert_to_xla_partition_spec": "xla_spmd.sharding.dtensor_placements",
    "disable_manual_sharding": "xla_spmd.tensors.manual_sharding",
    "enable_manual_sharding": "xla_spmd.tensors.manual_sharding",
    "get_1d_mesh": "xla_spmd.sharding.mesh",
    "get_global_mesh": "xla_spmd.sharding.mesh",
    "mark_sharding": "xla_spmd.tensors.marking",
    "mark_sharding_with_gradients": "xla_spmd.tensors.marking",
    "set_global_mesh": "xla_spmd.sharding.mesh",
    "shard_as": "xla_spmd.tensors.shard_as",
    "with_xla": "xla_spmd.training.distribute",
    "unwrap_sharded_tensor": "xla_spmd.tensors.sharded_tensor",
    "wrap_as_sharded_tensor": "xla_spmd.tensors.sharded_tensor",
    "wrap_if_sharded": "xla_spmd.tensors.marking",
    "xla_distribute_module": "xla_spmd.training.distribute",
    "xla_distribute_tensor": "xla_spmd.training.distribute",
    "xla_patched_nn_linear_forward": "xla_spmd.training.linear",
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
    "_mark_manual_sharding",
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
