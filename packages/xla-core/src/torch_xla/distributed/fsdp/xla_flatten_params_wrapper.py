"""torch_xla.distributed.fsdp.xla_flatten_params_wrapper: renames entries of state dicts (package xla-dist)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "replace_by_prefix_": "xla_dist.fsdp.stand_ins",
    },
)
