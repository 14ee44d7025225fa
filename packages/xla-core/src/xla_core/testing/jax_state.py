"""What tests of device plugins look at in jax itself: none of it needs torch, or starts a backend."""

from __future__ import annotations

from xla_core.jax_bridge.jax_private import backends_started
from xla_core.jax_bridge.jaxlib_runtime import hlo_sharding, to_host

__all__ = ["backends_started", "hlo_sharding", "to_host"]
