"""Shapes and dtypes of traced values, interned so that a trace can compare them by identity.

A ``TensorMeta`` lives as long as a step, a tensor or a cache has it. A later one of the same shape and dtype is
another object with another ``index``, which nothing is left to compare with.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Final

import torch

from xla_core.support import caches
from xla_core.torch_bridge.dtypes import numpy_dtype


class TensorMeta:
    """Shape and PyTorch dtype of one traced value.

    Instances are interned: two values of equal shape and dtype share one ``TensorMeta``,
    so ``is`` compares them and ``index``, which is negative, is the key of an input in a step: those of
    operations are tuples. ``as_tuple`` is the tuple of just this one: most operations have one result.
    """

    __slots__ = ("shape", "dtype", "index", "numel", "as_tuple", "_text", "__weakref__")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, index: int) -> None:
        self.shape: Final = shape
        self.dtype: Final = dtype
        self.index: Final = index
        numel = 1
        for size in shape:
            numel *= size
        self.numel: Final = numel
        self.as_tuple: Final = (self,)
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

_interned: dict[tuple[tuple[int, ...], torch.dtype], weakref.ref[TensorMeta]] = {}
_lock = threading.Lock()
_indices = itertools.count(-1, -1)


class _Sweep:
    at = caches.MOST
    """At this number of metas, those that nothing refers to any more are removed."""


def _sweep() -> None:
    """Forget metas without other references; called with the lock held."""
    for key, held in list(_interned.items()):
        if held() is None:
            del _interned[key]
    _Sweep.at = max(caches.MOST, 2 * len(_interned))


def _forget() -> None:
    with _lock:
        _sweep()


caches.register(
    "shapes and dtypes", bound=lambda: _Sweep.at, size=lambda: len(_interned), clear=_forget
)


def tensor_meta(shape: tuple[int, ...], dtype: torch.dtype) -> TensorMeta:
    """Return the one ``TensorMeta`` for ``shape`` and ``dtype``.

    Raises UnsupportedDtypeError for a dtype that XLA tensors cannot have, RuntimeError for too many
    dimensions.
    """
    interned = _interned.get((shape, dtype))
    meta = interned() if interned is not None else None
    return meta if meta is not None else _new_meta(shape, dtype)


def unshared_meta(shape: tuple[int, ...], dtype: torch.dtype) -> TensorMeta:
    """A ``TensorMeta`` of its own, for a shape that no other value will ever have: one of symbolic sizes.

    Those of two programs are never equal, so that each would stay in the table until the next sweep.
    """
    return TensorMeta(shape, dtype, next(_indices))


def _new_meta(shape: tuple[int, ...], dtype: torch.dtype) -> TensorMeta:
    numpy_dtype(dtype)
    if len(shape) > _MOST_DIMENSIONS:
        raise RuntimeError(MSG_DIMENSIONS.format(most=_MOST_DIMENSIONS, dimensions=len(shape)))
    with _lock:
        interned = _interned.get((shape, dtype))
        meta = interned() if interned is not None else None
        if meta is None:
            if len(_interned) >= _Sweep.at:
                _sweep()
            meta = TensorMeta(shape, dtype, next(_indices))
            _interned[shape, dtype] = weakref.ref(meta)
    return meta
