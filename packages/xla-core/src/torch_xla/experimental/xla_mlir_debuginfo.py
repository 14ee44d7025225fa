"""torch_xla.experimental.xla_mlir_debuginfo: locations of single operations, which exports have of themselves."""

from __future__ import annotations

from xla_core.api.not_available import write_mlir_debuginfo as write_mlir_debuginfo

write_mlir_debuginfo_meta = write_mlir_debuginfo_tensor = write_mlir_debuginfo
