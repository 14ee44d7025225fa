"""torch_xla._dynamo: the bridge to ``torch.compile`` under the name that other devices' backends import."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
