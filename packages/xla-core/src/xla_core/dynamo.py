"""Makes ``torch.compile`` take ``xla`` tensors; its backend ``openxla`` is PyTorch's own.

That backend hands each graph to ``torch_xla.core.dynamo_bridge.extract_compiled_graph``.
"""

from __future__ import annotations

from typing import Final

from xla_core import _torch_compat
from xla_core.tensor import XLATensorType

# what models call and graphs hold: operators and no state of ours
_TRACED: Final = ("xla_core.composites", "xla_core.custom_calls")
_prepared: list[bool] = []


def prepare() -> None:
    """Register with Dynamo, once. Changes none of its settings."""
    if _prepared:
        return
    _prepared.append(True)
    _torch_compat.let_dynamo_take(XLATensorType, ("xla_core", "torch_xla"), _TRACED)
