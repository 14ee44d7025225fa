"""torch_xla.core.dynamo_bridge: what PyTorch's backend ``openxla`` of ``torch.compile`` calls."""

from __future__ import annotations

from xla_core.dynamo import dynamo_backend
from xla_core.dynamo.compiled_graph import extract_compiled_graph as extract_compiled_graph
from xla_core.dynamo.compiled_graph import (
    partition_fx_graph_for_cpu_fallback as partition_fx_graph_for_cpu_fallback,
)
from xla_core.dynamo.graph_inputs import GraphInputMatcher as GraphInputMatcher

dynamo_backend.prepare()
