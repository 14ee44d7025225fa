"""torch_xla.experimental.gradient_accumulation: sums the gradients of several steps in one loop."""

from __future__ import annotations

from xla_core.computations.accumulation import gradient_accumulation as gradient_accumulation
