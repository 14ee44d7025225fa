"""torch_xla._dynamo.dynamo_backend2: the backend ``openxla`` of ``torch.compile`` as a function."""

from __future__ import annotations

from torch_xla.core import dynamo_bridge as dynamo_bridge
from xla_core.dynamo.bridge_helpers import dynamo_backend as dynamo_backend
