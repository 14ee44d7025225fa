"""torch_xla.amp.syncfree: optimizers that skip a step with infinite gradients without reading a value."""

from __future__ import annotations

from torch_xla._packages import lazy_names
from xla_core.torch_features.syncfree_optimizers import SGD as SGD
from xla_core.torch_features.syncfree_optimizers import Adam as Adam
from xla_core.torch_features.syncfree_optimizers import AdamW as AdamW

__getattr__, __dir__ = lazy_names(__name__)
