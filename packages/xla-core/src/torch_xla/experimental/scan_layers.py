"""torch_xla.experimental.scan_layers: runs a sequence of equal layers as one loop."""

from __future__ import annotations

from xla_core.computations.scan import scan as scan
from xla_core.computations.scan_layers import scan_layers as scan_layers
