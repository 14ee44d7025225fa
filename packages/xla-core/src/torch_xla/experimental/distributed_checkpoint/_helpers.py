"""torch_xla.experimental.distributed_checkpoint._helpers: state dicts and plans (package xla-spmd)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "dedup_tensors": "xla_spmd.checkpoint.state_dicts",
        "flatten_state_dict": "xla_spmd.checkpoint.state_dicts",
        "narrow_tensor_by_index": "xla_spmd.checkpoint.state_dicts",
        "set_element": "xla_spmd.checkpoint.state_dicts",
        "XLAShardedTensor": "xla_spmd.tensors.sharded_tensor",
        "ShardingType": "xla_spmd.sharding.hlo_sharding",
    },
)
