"""torch_xla.experimental.fori_loop: loops whose length only the device knows."""

from __future__ import annotations

from xla_core.computations.loops import fori_loop as fori_loop
from xla_core.computations.loops import while_loop as while_loop
