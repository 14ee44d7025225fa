"""torch_xla.amp: automatic mixed precision."""

from __future__ import annotations

from torch_xla._packages import lazy_names
from torch_xla.amp import syncfree as syncfree
from torch_xla.amp.autocast_mode import autocast as autocast
from xla_core.api.deprecated import GradScaler as GradScaler

__getattr__, __dir__ = lazy_names(__name__)
