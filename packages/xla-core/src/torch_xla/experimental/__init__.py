"""torch_xla.experimental: experimental features, and former places of names that have moved."""

from __future__ import annotations

from torch_xla._packages import lazy_names
from xla_core.api.compile_decorator import compile as compile
from xla_core.api.varying_hints import mark_dynamic as mark_dynamic
from xla_core.execution.eager_mode import is_on as is_eager_mode
from xla_core.execution.eager_mode import mode as eager_mode_context
from xla_core.execution.eager_mode import switch as eager_mode

__getattr__, __dir__ = lazy_names(__name__)
