"""torch_xla._internal: the private names of torch_xla that well-known clients use."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
