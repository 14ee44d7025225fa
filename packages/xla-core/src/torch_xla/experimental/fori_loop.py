"""torch_xla.experimental.fori_loop: loops on the device, whose number of iterations may be a tensor's value."""

from __future__ import annotations

from xla_core.computations.loops import fori_loop as fori_loop
from xla_core.computations.loops import while_loop as while_loop
