"""torch_xla.experimental.scan: a function over the leading dimension of tensors, as one loop."""

from __future__ import annotations

from xla_core.computations.scan import scan as scan
