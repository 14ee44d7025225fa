"""torch_xla.amp.syncfree._functional: optimizer steps over lists of tensors."""

from __future__ import annotations

from xla_core.torch_features.syncfree_optimizers import adam_step as adam_step
from xla_core.torch_features.syncfree_optimizers import sgd_step as sgd_step
