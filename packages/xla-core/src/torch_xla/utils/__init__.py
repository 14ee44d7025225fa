"""torch_xla.utils: helpers for scripts, checkpoints and serialization."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
