"""torch_xla.experimental.capture: steps that are recorded once and replayed without running their Python."""

from __future__ import annotations

from xla_core.capture.captured import Captured as Captured
from xla_core.capture.captured import capture as capture
from xla_core.capture.errors import CaptureError as CaptureError
