"""torch_xla.experimental.mark_pattern_utils: named parts of a computation in its StableHLO."""

from __future__ import annotations

from xla_core.torch_features.composites import (
    StableHLOCompositeBuilder as StableHLOCompositeBuilder,
)
