"""torch_xla.experimental.xla_mlir_debuginfo: its function raises an error that names the option for locations."""

from __future__ import annotations

from xla_core.api.not_available import write_mlir_debuginfo as write_mlir_debuginfo

write_mlir_debuginfo_meta = write_mlir_debuginfo_tensor = write_mlir_debuginfo
