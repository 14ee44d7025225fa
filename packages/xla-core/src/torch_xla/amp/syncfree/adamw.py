"""torch_xla.amp.syncfree.adamw: see ``torch_xla.amp.syncfree``."""

from __future__ import annotations

from xla_core.torch_features.syncfree_optimizers import AdamW as AdamW
