"""torch_xla.utils.closures: handlers that run step closures at the end of a step."""

from __future__ import annotations

from xla_core.execution.step_closures import AsyncClosureHandler as AsyncClosureHandler
from xla_core.execution.step_closures import ClosureHandler as ClosureHandler
