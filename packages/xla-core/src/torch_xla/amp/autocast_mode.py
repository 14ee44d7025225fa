"""torch_xla.amp.autocast_mode: see ``torch_xla.amp``."""

from __future__ import annotations

from xla_core.torch_features.autocast import autocast as autocast
