"""torch_xla._internal.custom_kernel: sharding marks and buffer donation in functions of ``torch.compile``."""

from __future__ import annotations

from torch_xla._packages import lazy_names
from xla_core.dynamo.bridge_helpers import dynamo_set_buffer_donor_ as dynamo_set_buffer_donor_

dynamo_set_buffer_donor_xla_ = dynamo_set_buffer_donor_

__getattr__, __dir__ = lazy_names(
    __name__,
    dict.fromkeys(("dynamo_mark_sharding", "dynamo_mark_sharding_xla"), "xla_spmd.lowering.dynamo"),
)
