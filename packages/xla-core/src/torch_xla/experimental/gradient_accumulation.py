"""torch_xla.experimental.gradient_accumulation: several steps' gradients in one loop."""

from __future__ import annotations

from xla_core.computations.accumulation import gradient_accumulation as gradient_accumulation
