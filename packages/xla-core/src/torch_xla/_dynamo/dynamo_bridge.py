"""torch_xla._dynamo.dynamo_bridge: torch_xla.core.dynamo_bridge under its own name."""

from __future__ import annotations

from torch_xla.core.dynamo_bridge import Deduper as Deduper
from torch_xla.core.dynamo_bridge import GraphInputMatcher as GraphInputMatcher
from torch_xla.core.dynamo_bridge import NoneRemover as NoneRemover
from torch_xla.core.dynamo_bridge import (
    alias_with_buffer_donor_config as alias_with_buffer_donor_config,
)
from torch_xla.core.dynamo_bridge import extract_compiled_graph as extract_compiled_graph
from torch_xla.core.dynamo_bridge import (
    extract_compiled_graph_helper as extract_compiled_graph_helper,
)
from torch_xla.core.dynamo_bridge import get_fallback_ops as get_fallback_ops
from torch_xla.core.dynamo_bridge import is_xla_tensor as is_xla_tensor
from torch_xla.core.dynamo_bridge import (
    partition_fx_graph_for_cpu_fallback as partition_fx_graph_for_cpu_fallback,
)
