"""torch_xla.experimental.callback: calls a function when a tensor's value is computed."""

from __future__ import annotations

from xla_core.torch_features.ready_callbacks import on_ready_callback as on_ready_callback
from xla_core.torch_features.ready_callbacks import on_ready_event as on_ready_event
