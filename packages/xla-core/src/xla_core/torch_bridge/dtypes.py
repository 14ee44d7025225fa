"""PyTorch dtypes, their numpy counterparts, and the mapping a device applies to them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import ml_dtypes
import numpy as np
import torch

MSG_NOT_DENSE: Final = (
    "an xla tensor is dense, and cannot be made from one of layout {layout}; call .to_dense() first"
)

NUMPY_DTYPES: Final[Mapping[torch.dtype, np.dtype]] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex32: np.dtype(np.complex64),  # see HALF_COMPLEX
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
}

HALF_COMPLEX: Final = torch.complex32
"""Neither numpy nor XLA has it: it is kept as complex64, whose parts every operator rounds to float16."""

# dtypes that torch and numpy cannot exchange directly: an integer of the same width carries the bits.
_CARRIERS: Final[Mapping[torch.dtype, torch.dtype]] = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e5m2: torch.int8,
}


_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_RANGES: Final[Mapping[torch.dtype, tuple[float, float]]] = {
    **{dtype: (-torch.finfo(dtype).max, torch.finfo(dtype).max) for dtype in _FLOATS},
    **{dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in _INTEGERS},
    torch.uint8: (-255, 255),  # PyTorch's kernels let negative numbers wrap
}
_INFINITIES: Final = (float("inf"), float("-inf"))


class UnsupportedDtypeError(TypeError):
    """A dtype that XLA has no type for."""


class _Lowering(threading.local):
    keep: Callable[[np.dtype], np.dtype] | None = None


_lowering = _Lowering()


@contextlib.contextmanager
def kept_as(keep: Callable[[np.dtype], np.dtype]) -> Iterator[None]:
    """Inside, ``numpy_dtype`` gives what a device keeps a dtype as: for lowering, in this thread."""
    former = _lowering.keep
    _lowering.keep = keep
    try:
        yield
    finally:
        _lowering.keep = former


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """The numpy dtype of ``dtype``; while a step is lowered, the one its device keeps it as.

    Raises UnsupportedDtypeError where XLA tensors have none.
    """
    numpy_form = NUMPY_DTYPES.get(dtype)
    if numpy_form is None:
        raise UnsupportedDtypeError(
            f"an xla tensor cannot have dtype {dtype}; use one of {', '.join(map(str, NUMPY_DTYPES))}"
        )
    keep = _lowering.keep
    return numpy_form if keep is None else keep(numpy_form)


def holds(dtype: torch.dtype | None, number: complex) -> bool:
    """Whether every kernel of PyTorch converts ``number`` to ``dtype``; many refuse one out of its range.

    True for dtypes for which this is not known, and for None.
    """
    if isinstance(number, complex):
        return dtype is None or dtype.is_complex or not number.imag
    if dtype not in _RANGES:
        return True
    low, high = _RANGES[dtype]
    if low <= number <= high:
        return True
    return dtype in _FLOATS and (number != number or number in _INFINITIES)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous numpy array with the values of a CPU tensor; it may share the tensor's memory.

    Raises UnsupportedDtypeError where XLA tensors cannot have its dtype, TypeError for a sparse one.
    """
    if tensor.layout is not torch.strided:
        raise TypeError(MSG_NOT_DENSE.format(layout=tensor.layout))
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype is HALF_COMPLEX:
        tensor = tensor.to(torch.complex64)
    wanted = numpy_dtype(tensor.dtype)
    carrier = _CARRIERS.get(tensor.dtype)
    if carrier is None:
        return tensor.numpy()
    return tensor.view(carrier).numpy().view(wanted)


def from_numpy(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous CPU tensor of ``dtype`` with the values of ``array``, which it takes over if it can.

    Its strides are those that PyTorch gives a new tensor, whatever ``array`` has: numpy calls an
    array contiguous whose strides of sizes 0 and 1 are any numbers.
    """
    shape = array.shape
    if not array.size:
        return torch.empty(shape, dtype=dtype)
    array = np.ascontiguousarray(array, dtype=numpy_dtype(dtype)).reshape(-1).reshape(shape)
    carrier = _CARRIERS.get(dtype)
    if carrier is None:
        tensor = torch.from_numpy(array)
        return tensor.to(dtype) if dtype is HALF_COMPLEX else tensor
    return torch.from_numpy(array.view(numpy_dtype(carrier))).view(dtype)
