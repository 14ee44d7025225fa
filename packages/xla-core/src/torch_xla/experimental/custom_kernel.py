"""torch_xla.experimental.custom_kernel: attention under the name that model libraries import."""

from __future__ import annotations

from xla_core.attention import flash_attention as flash_attention
from xla_core.jax_guard import jax_import_guard as jax_import_guard
from xla_core.operators import XLA_LIB as XLA_LIB
