"""The bytes that one chip holds of a model and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from xla_core.contract.foreign_values import ForeignObject
from xla_core.extension_api.tensors import XLATensor, exact_buffer, storage_of


def bytes_by_kind(
    parameters: Iterable[torch.Tensor],
    buffers: Iterable[torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
) -> dict[str, int]:
    """Bytes on the first chip, without the padding of layouts, and the ``count`` of all parameters' elements."""
    own = list(parameters)
    trained = [p for p in own if p.requires_grad]
    return {
        "parameters": _bytes_on_a_chip(own),
        "buffers": _bytes_on_a_chip(buffers),
        "optimizer state": _bytes_on_a_chip(states_of(optimizer)),
        # a gradient is split like its parameter
        "gradients": _bytes_on_a_chip(trained) if optimizer is not None else 0,
        "count": sum(p.numel() for p in own),
    }


def states_of(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """The tensors of an optimizer's state."""
    states = optimizer.state.values() if optimizer is not None else ()
    return [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]


def _bytes_on_a_chip(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the tensors' parts on the first device, without the padding of layouts."""
    different = {id(storage_of(t)): t for t in tensors if isinstance(t, XLATensor)}
    return sum(math.prod(part_of(t)) * t.element_size() for t in different.values())


def part_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of the first device's part of a tensor, or the whole shape if its value is pending."""
    storage = storage_of(tensor) if isinstance(tensor, XLATensor) else None
    if storage is None or storage.buffer is None:
        return tuple(tensor.shape)
    backend: ForeignObject = storage.trace.backend
    buffer = exact_buffer(storage.buffer)
    shape: tuple[int, ...] = backend.client.shards(buffer)[0][1].shape
    return shape
