"""torch_xla.distributed.fsdp.wrap: which parts of a model to wrap (package xla-dist)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "always_wrap_policy": "xla_dist.fsdp.wrap",
        "lambda_auto_wrap_policy": "xla_dist.fsdp.wrap",
        "recursive_wrap": "xla_dist.fsdp.wrap",
        "size_based_auto_wrap_policy": "xla_dist.fsdp.wrap",
        "transformer_auto_wrap_policy": "xla_dist.fsdp.wrap",
    },
)
