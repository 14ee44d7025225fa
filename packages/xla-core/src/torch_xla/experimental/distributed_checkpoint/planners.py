"""torch_xla.experimental.distributed_checkpoint.planners: planners for split tensors (package xla-spmd)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "SPMDLoadPlanner": "xla_spmd.checkpoint.planners",
        "SPMDSavePlanner": "xla_spmd.checkpoint.planners",
        "dedup_tensors": "xla_spmd.checkpoint.state_dicts",
        "flatten_state_dict": "xla_spmd.checkpoint.state_dicts",
        "narrow_tensor_by_index": "xla_spmd.checkpoint.state_dicts",
        "set_element": "xla_spmd.checkpoint.state_dicts",
        "XLAShard": "xla_spmd.tensors.sharded_tensor",
        "XLAShardedTensor": "xla_spmd.tensors.sharded_tensor",
    },
)
