"""What a trace has recorded, looked at without changing what the step will be: xla-core's."""

from __future__ import annotations

from xla_core.execution.pending_graph import graph_of as graph_of
from xla_core.execution.pending_graph import is_pending as is_pending
