"""torch_xla.distributed.xla_backend: torch.distributed's backend ``xla`` (package xla-dist)."""

from __future__ import annotations

from torch_xla._packages import package_module

_module = package_module("xla_dist.collectives.process_group", __name__)

ProcessGroupXla = _module.ProcessGroupXla
new_xla_process_group = _module.new_xla_process_group
