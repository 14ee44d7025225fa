"""torch_xla.distributed.fsdp._init_utils: its functions raise errors that say how to initialize meta modules."""

from __future__ import annotations

from xla_core.api.not_available import get_orig_params as _get_orig_params
from xla_core.api.not_available import materialize_module as _materialize_module

_TORCHDISTX_AVAIL = False
