"""lazy_tensor_core.debug: see ``metrics``."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
