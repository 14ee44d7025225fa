"""torch_xla.amp.syncfree.adam: see ``torch_xla.amp.syncfree``."""

from __future__ import annotations

from xla_core.torch_features.syncfree_optimizers import Adam as Adam
