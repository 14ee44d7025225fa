"""``python -m torch_xla.distributed.fsdp.consolidate_sharded_ckpts``: merges sharded checkpoints (xla-dist)."""

from __future__ import annotations

from torch_xla._packages import lazy_names, package_module

__getattr__, __dir__ = lazy_names(
    __name__,
    dict.fromkeys(("consolidate_sharded_model_checkpoints", "main"), "xla_dist.fsdp.consolidate"),
)

if __name__ == "__main__":
    package_module("xla_dist.fsdp.consolidate", __spec__.name).main()
