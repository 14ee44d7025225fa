"""torch_xla.test: what example scripts share."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
