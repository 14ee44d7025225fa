"""torch_xla.debug: metrics, profiles and dumps; the code is in the package xla-debug."""

from __future__ import annotations

from torch_xla._packages import lazy_names
from torch_xla.debug import metrics as metrics
from torch_xla.debug import profiler as profiler

__getattr__, __dir__ = lazy_names(__name__)
