"""``python -m torch_xla.distributed.fsdp.consolidate_sharded_ckpts``: one checkpoint from all (xla-dist)."""

from __future__ import annotations

from torch_xla._packages import package_module

if __name__ == "__main__":
    package_module("xla_dist.fsdp.consolidate", __spec__.name).main()
