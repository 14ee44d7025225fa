"""torch_xla.amp.syncfree: optimizers that skip a step with infinite gradients without asking the device."""

from __future__ import annotations

from xla_core.syncfree import SGD as SGD
from xla_core.syncfree import Adam as Adam
from xla_core.syncfree import AdamW as AdamW
