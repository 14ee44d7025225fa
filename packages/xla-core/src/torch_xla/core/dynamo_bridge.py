"""torch_xla.core.dynamo_bridge: what PyTorch's backend ``openxla`` of ``torch.compile`` calls."""

from __future__ import annotations

from xla_core.api.xla_model import is_xla_tensor as is_xla_tensor
from xla_core.dynamo import dynamo_backend
from xla_core.dynamo.bridge_helpers import Deduper as Deduper
from xla_core.dynamo.bridge_helpers import NoneRemover as NoneRemover
from xla_core.dynamo.bridge_helpers import get_fallback_ops as get_fallback_ops
from xla_core.dynamo.compiled_graph import extract_compiled_graph as extract_compiled_graph
from xla_core.dynamo.compiled_graph import (
    partition_fx_graph_for_cpu_fallback as partition_fx_graph_for_cpu_fallback,
)
from xla_core.dynamo.graph_inputs import GraphInputMatcher as GraphInputMatcher
from xla_core.launching.buffer_donation import (
    alias_with_buffer_donor_config as alias_with_buffer_donor_config,
)

extract_compiled_graph_helper = extract_compiled_graph
dynamo_backend.prepare()
