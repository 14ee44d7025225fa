"""torch_xla.distributed.fsdp.utils: helpers of wrapped models (package xla-dist)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "checkpoint_module": "xla_dist.fsdp.checkpointed",
    },
)
