"""torch_xla._internal.rendezvous: the rendezvous handler of torch.distributed (package xla-dist)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "pjrt_rendezvous_handler": "xla_dist.autoload",
    },
)
