"""Shapes and dtypes of traced values, interned so that a trace can compare them by identity."""

from __future__ import annotations

import threading
from typing import Final

import torch

from xla_core.torch_bridge.dtypes import numpy_dtype


class TensorMeta:
    """Shape and PyTorch dtype of one traced value.

    Instances are interned: two values of equal shape and dtype share one ``TensorMeta``,
    so ``is`` compares them and ``index`` identifies them in a step key. ``alone`` is the tuple of
    just this one: most operations have one result.
    """

    __slots__ = ("shape", "dtype", "index", "numel", "alone", "_text")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, index: int) -> None:
        self.shape: Final = shape
        self.dtype: Final = dtype
        self.index: Final = index
        numel = 1
        for size in shape:
            numel *= size
        self.numel: Final = numel
        self.alone: Final = (self,)
        self._text: Final = f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"

    @property
    def nbytes(self) -> int:
        """Bytes of a dense buffer of this shape in the PyTorch dtype."""
        return self.numel * self.dtype.itemsize

    def __repr__(self) -> str:
        return self._text


# numpy's limit, through which values reach the runtime
_MOST_DIMENSIONS: Final = 64

MSG_DIMENSIONS: Final = (
    "only tensors with up to {most} dims are supported on xla devices, got {dimensions}"
)

_interned: dict[tuple[tuple[int, ...], torch.dtype], TensorMeta] = {}
_lock = threading.Lock()


def tensor_meta(shape: tuple[int, ...], dtype: torch.dtype) -> TensorMeta:
    """Return the one ``TensorMeta`` for ``shape`` and ``dtype``.

    Raises UnsupportedDtypeError for a dtype that XLA tensors cannot have, RuntimeError for too many
    dimensions.
    """
    found = _interned.get((shape, dtype))
    if found is None:
        numpy_dtype(dtype)
        if len(shape) > _MOST_DIMENSIONS:
            text = MSG_DIMENSIONS.format(most=_MOST_DIMENSIONS, dimensions=len(shape))
            raise RuntimeError(text)
        with _lock:
            found = _interned.get((shape, dtype))
            if found is None:
                found = TensorMeta(shape, dtype, len(_interned) + 1)
                _interned[shape, dtype] = found
    return found
