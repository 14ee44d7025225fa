"""torch_xla.amp.syncfree.sgd: see ``torch_xla.amp.syncfree``."""

from __future__ import annotations

from xla_core.torch_features.syncfree_optimizers import SGD as SGD
