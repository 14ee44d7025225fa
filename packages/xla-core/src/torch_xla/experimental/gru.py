"""torch_xla.experimental.gru: a GRU whose time steps are one loop."""

from __future__ import annotations

from xla_core.computations.gru import GRU as GRU
from xla_core.computations.scan import scan as scan
