"""torch_xla.experimental.pjrt_backend: ``init_method="pjrt://"``, the former name of ``xla://`` (xla-dist)."""

from __future__ import annotations

from torch_xla._packages import package_module

_module = package_module("xla_dist.autoload", __name__)
_module.register_former_scheme()
