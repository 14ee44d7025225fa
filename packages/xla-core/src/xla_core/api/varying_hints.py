"""How a program marks the sizes that vary: ``torch_xla.experimental.mark_dynamic``."""

from __future__ import annotations

from typing import Final

import torch

from xla_core.recording.xla_tensor import XLATensor

MSG_NOT_XLA: Final = "{type} is not an xla tensor: mark it when it is on the device"
MSG_VIEW: Final = "a view has no size of its own to mark: mark the tensor that it shows"
MSG_DIM: Final = "a tensor of {rank} dimensions has no dimension {dim}"
MSG_LOW: Final = "max={most} is below the size {size} of dimension {dim}"


def mark_dynamic(tensor: torch.Tensor, dim: int, *, max: int | None = None) -> None:
    """Declare that the size of a dimension of ``tensor``, an input of steps, varies from step to step.

    Steps that take it share programs as with ``XLA_VARYING_SHAPES=1``, even if that is not set, and from the second
    size on instead of the third. Shared programs serve sizes up to ``max`` (default: None, no limit); steps of
    larger sizes are compiled separately. Only this tensor is marked: mark each batch. Results do not change.

    Raises TypeError if ``tensor`` is not an xla tensor, RuntimeError for a view, IndexError if it has no dimension
    ``dim``, and ValueError if ``max`` is below the size.
    """
    if not isinstance(tensor, XLATensor):
        raise TypeError(MSG_NOT_XLA.format(type=type(tensor).__name__))
    if tensor._v is not None:
        raise RuntimeError(MSG_VIEW)
    rank = tensor.dim()
    if not -rank <= dim < rank:
        raise IndexError(MSG_DIM.format(rank=rank, dim=dim))
    size = tensor.shape[dim]
    if max is not None and max < size:
        raise ValueError(MSG_LOW.format(most=max, size=size, dim=dim))
    tensor._s.mark_varying(dim % rank, max)
