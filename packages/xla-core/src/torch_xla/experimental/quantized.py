"""torch_xla.experimental.quantized: importing it makes ``torch.ops.quantized_decomposed`` available."""

from __future__ import annotations

from xla_core.torch_bridge.op_library import load_quantized_operators as _load_quantized_operators

_load_quantized_operators()
