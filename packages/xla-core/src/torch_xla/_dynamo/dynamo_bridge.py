"""torch_xla._dynamo.dynamo_bridge: torch_xla.core.dynamo_bridge under its own name."""

from __future__ import annotations

from torch_xla.core.dynamo_bridge import GraphInputMatcher as GraphInputMatcher
from torch_xla.core.dynamo_bridge import extract_compiled_graph as extract_compiled_graph
from torch_xla.core.dynamo_bridge import (
    partition_fx_graph_for_cpu_fallback as partition_fx_graph_for_cpu_fallback,
)
