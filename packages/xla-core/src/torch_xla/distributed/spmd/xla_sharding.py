"""torch_xla.distributed.spmd.xla_sharding: the names of ``torch_xla.distributed.spmd`` once more."""

from __future__ import annotations

from torch_xla._packages import JAX_HELPERS, lazy_names
from torch_xla.distributed.spmd import HOMES

__getattr__, __dir__ = lazy_names(__name__, {**HOMES, **JAX_HELPERS})
