"""torch_xla.distributed.fsdp.state_dict_utils: merges sharded state dicts (package xla-dist)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "consolidate_sharded_state_dicts": "xla_dist.fsdp.consolidate",
        "consolidate_sharded_model_checkpoints": "xla_dist.fsdp.consolidate",
    },
)
