"""torch_xla.core.xla_op_registry: operations that are built with xla_builder."""

from __future__ import annotations

from xla_core.builder.op_registry import Op as Op
from xla_core.builder.op_registry import register as register
