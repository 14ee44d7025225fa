"""Makes ``torch.compile`` take ``xla`` tensors; its backend ``openxla`` is PyTorch's own.

That backend hands each graph to ``torch_xla.core.dynamo_bridge.extract_compiled_graph``.
"""

from __future__ import annotations

from xla_core import _torch_compat
from xla_core.tensor import XLATensorType

_prepared: list[bool] = []


def prepare() -> None:
    """Register with Dynamo, once. Changes none of its settings."""
    if _prepared:
        return
    _prepared.append(True)
    _torch_compat.let_dynamo_take(XLATensorType, ("xla_core", "torch_xla"))
