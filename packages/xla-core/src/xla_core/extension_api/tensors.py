"""Tensors on ``xla`` devices: what they show, their values, and containers of them."""

from __future__ import annotations

from typing import TypeVar

from xla_core.dispatch.transfers import materialise, read, upload
from xla_core.execution.poisoned_values import restore_value, revoke
from xla_core.lowering.held_values import HeldValue, held_values, tell_lines
from xla_core.recording.storage import NoValueError, Storage, View
from xla_core.recording.tensor_trees import (
    collect,
    map_selected,
    map_tensors,
    send_cpu_data_to_device,
)
from xla_core.recording.xla_tensor import XLATensor, tensor_on
from xla_core.torch_bridge.dtypes import from_numpy, numpy_dtype, to_numpy
from xla_core.varying.padded_buffer import exact_buffer

__all__ = [
    "HeldValue",
    "NoValueError",
    "XLATensor",
    "alias",
    "collect",
    "exact_buffer",
    "from_numpy",
    "held_values",
    "map_selected",
    "map_tensors",
    "materialise",
    "numpy_dtype",
    "read",
    "restore_value",
    "revoke",
    "send_cpu_data_to_device",
    "storage_of",
    "tell_lines",
    "to_numpy",
    "upload",
    "view_of",
]

_Kind = TypeVar("_Kind", bound=XLATensor)


def storage_of(tensor: XLATensor) -> Storage:
    """What holds the value that ``tensor`` shows, shared by all that alias it; ``.trace`` is its device's."""
    return tensor._s


def view_of(tensor: XLATensor) -> View | None:
    """The view through which ``tensor`` looks at its storage; None where it shows the whole of it."""
    return tensor._v


def alias(tensor: XLATensor, kind: type[_Kind]) -> _Kind:
    """A tensor of the class ``kind`` that shows the same storage through the same view; autograd sees none."""
    aliased = tensor_on(tensor._s, tensor._v, kind=kind)
    assert isinstance(aliased, kind)
    return aliased
