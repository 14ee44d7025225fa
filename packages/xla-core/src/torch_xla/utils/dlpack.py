"""torch_xla.utils.dlpack: values for other array libraries, and theirs here."""

from __future__ import annotations

from xla_core.dlpack import from_dlpack as from_dlpack
from xla_core.dlpack import to_dlpack as to_dlpack
