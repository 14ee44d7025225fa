"""torch_xla.experimental.capture: steps that are recorded once and replayed without their Python code."""

from __future__ import annotations

from xla_core.capture.captured import Captured as Captured
from xla_core.capture.captured import capture as capture
from xla_core.capture.errors import CaptureError as CaptureError
from xla_core.capture.graphed_callables import make_graphed_callables as make_graphed_callables
from xla_core.capture.graphs import Graph as Graph
from xla_core.capture.graphs import graph as graph
