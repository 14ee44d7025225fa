"""torch_xla.core.xla_builder: jax functions and hand-built computations as operations of a step."""

from __future__ import annotations

from xla_core.computations.jax_calls import call_jax as call_jax
