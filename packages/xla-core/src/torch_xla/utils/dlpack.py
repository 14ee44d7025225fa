"""torch_xla.utils.dlpack: exchanges values with other array libraries."""

from __future__ import annotations

from xla_core.torch_features.dlpack import from_dlpack as from_dlpack
from xla_core.torch_features.dlpack import to_dlpack as to_dlpack
