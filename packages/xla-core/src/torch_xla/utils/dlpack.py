"""torch_xla.utils.dlpack: values for other array libraries, and theirs here."""

from __future__ import annotations

from xla_core.torch_features.dlpack import from_dlpack as from_dlpack
from xla_core.torch_features.dlpack import to_dlpack as to_dlpack
