"""torch_xla.core.dynamo_bridge: what PyTorch's backend ``openxla`` of ``torch.compile`` calls."""

from __future__ import annotations

from xla_core import dynamo
from xla_core.compiled_graph import extract_compiled_graph as extract_compiled_graph

dynamo.prepare()
