"""torch_xla.experimental.mark_pattern_utils: marks parts of a computation as StableHLO composites."""

from __future__ import annotations

from xla_core.torch_features.composites import (
    StableHLOCompositeBuilder as StableHLOCompositeBuilder,
)
