"""Makes ``torch.compile`` take ``xla`` tensors; its backend ``openxla`` is PyTorch's own.

That backend hands each graph to ``torch_xla.core.dynamo_bridge.extract_compiled_graph``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import torch

from xla_core.contract.foreign_values import AnyFunction
from xla_core.dynamo import lost_order
from xla_core.recording.xla_tensor import XLATensor, XLATensorType
from xla_core.support import own_packages
from xla_core.support.once import Once
from xla_core.torch_bridge import aot_graphs, device_guard, torch_private

F = TypeVar("F", bound=AnyFunction)

# what models call and graphs hold: operators and no state of ours
_TRACED: Final = ("xla_core.torch_features.composites", "xla_core.torch_features.custom_calls")
_STEPPED_OVER: Final = ("xla_core", "torch_xla")
# a model may call functions of the other packages, which record operators; jax's run inside of ours
_INLINED: Final = (
    *(name for name in own_packages.IMPORT_NAMES if name not in _STEPPED_OVER),
    "jax",
    "jaxlib",
)
_prepared: Final = Once()
_to_tell: list[Callable[[], object]] = []


def prepare() -> None:
    """Register with Dynamo, once. Changes none of its settings."""
    if not _prepared.begin():
        return
    torch_private.let_dynamo_take(XLATensorType)
    aot_graphs.step_over_code(_STEPPED_OVER, _TRACED, _INLINED)
    aot_graphs.run_effects_in_order(XLATensor)
    aot_graphs.run_writing_operators(XLATensor)
    aot_graphs.let_first_runs_pass(XLATensor)
    aot_graphs.refuse_inductor("xla")
    aot_graphs.number_stand_ins("xla", device_guard.current_index)
    aot_graphs.let_stand_ins_change_shape(XLATensor)
    lost_order.prepare()
    for tell in _to_tell:
        tell()


def _tell(tell: Callable[[], object]) -> None:
    """Let Dynamo, which is slow to import, hear of something when it is there."""
    _to_tell.append(tell)
    if _prepared.done:
        tell()


def kept_in_graphs(function: F) -> F:
    """A decorator: a call of ``function`` is a node of ``torch.compile``'s graphs, and ends none."""
    _tell(lambda: torch.compiler.allow_in_graph(function))
    return function


def constant_in_graphs(function: F) -> F:
    """A decorator: what ``function`` returns while a graph is recorded is a constant of the graph."""
    _tell(lambda: torch.compiler.assume_constant_result(function))
    return function
