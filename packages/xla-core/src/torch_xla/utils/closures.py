"""torch_xla.utils.closures: who runs the functions that wait for the end of a step."""

from __future__ import annotations

from xla_core.execution.step_closures import AsyncClosureHandler as AsyncClosureHandler
from xla_core.execution.step_closures import ClosureHandler as ClosureHandler
