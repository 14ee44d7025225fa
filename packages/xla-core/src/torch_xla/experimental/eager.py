"""torch_xla.experimental.eager: eager mode, in which each operator runs at once as a program of its own."""

from __future__ import annotations

from xla_core.api.compile_decorator import compile as compile
from xla_core.execution.eager_mode import is_on as is_eager_mode
from xla_core.execution.eager_mode import mode as eager_mode_context
from xla_core.execution.eager_mode import switch as eager_mode
