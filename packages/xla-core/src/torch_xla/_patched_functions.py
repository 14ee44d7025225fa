"""torch_xla._patched_functions: variants of torch's functions for ``xla`` devices."""

from __future__ import annotations

from math import inf as inf

from xla_core.computations.gru import GRU as ScanGRU
from xla_core.torch_features.gradient_clipping import clip_grad_norm_ as clip_grad_norm_

__all__ = ["ScanGRU", "clip_grad_norm_", "inf"]
