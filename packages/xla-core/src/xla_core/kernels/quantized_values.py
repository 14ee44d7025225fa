"""Quantizes tensors to integers with scales and zero points, and back, with torch_xla's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

MSG_DTYPE: Final = "{name!r} is not an integer dtype; give 'int8', 'uint8', 'int16' or 'int32'"
MSG_COUNT: Final = (
    "{scales} scales and {zeros} zero points; give one of each for the tensor (axis=-1), or one of each "
    "for every index along axis {axis}: {wanted}"
)
MSG_INT4: Final = "{count} values for a tensor of {numel} elements"
MSG_INT4_RANGE: Final = "{value} is not a 4-bit integer; these are from -8 to 7"

_DTYPES: Final = {
    "int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32,
}  # fmt: skip


def quantize_tensor(
    input: torch.Tensor,
    scales: Sequence[float],
    zero_points: Sequence[int],
    quant_min: int,
    quant_max: int,
    dtype: str,
    axis: int = -1,
) -> torch.Tensor:
    """``round(input / scale) + zero_point``, clamped to ``quant_min .. quant_max``, as integers of ``dtype``.

    With ``axis`` -1 (the default) there is one scale and zero point for the tensor, otherwise one for each index
    along
    ``axis``. ``dtype`` is ``'int8'``, ``'uint8'``, ``'int16'`` or ``'int32'``. Raises ValueError for another dtype
    or another number of scales or zero points.
    """
    wanted = _integers(dtype)
    scale, zero = _along(input, scales, zero_points, axis)
    whole = torch.round(input / scale.to(input.dtype)) + zero.to(input.dtype)
    return whole.clamp(quant_min, quant_max).to(wanted)


def dequantize_tensor(
    input: torch.Tensor,
    scales: Sequence[float],
    zero_points: Sequence[int],
    quant_min: int,
    quant_max: int,
    dtype: str,
    axis: int = -1,
) -> torch.Tensor:
    """``(input - zero_point) * scale`` as float32, the inverse of ``quantize_tensor`` but for rounding.

    ``quant_min`` and ``quant_max`` are accepted and have no effect. Raises ValueError as ``quantize_tensor``.
    """
    del quant_min, quant_max
    _integers(dtype)
    scale, zero = _along(input, scales, zero_points, axis)
    return (input.to(torch.float32) - zero.to(torch.float32)) * scale


def cast_int4(input: torch.Tensor, values: Sequence[int]) -> torch.Tensor:
    """An int8 tensor of ``input``'s shape, on its device, with these 4-bit values.

    Each value takes a byte, as programs have no 4-bit integers here. Raises ValueError for values outside of -8 to
    7, and for another number of values.
    """
    given = list(values)
    if len(given) != input.numel():
        raise ValueError(MSG_INT4.format(count=len(given), numel=input.numel()))
    beyond = next((v for v in given if not -8 <= v <= 7), None)
    if beyond is not None:
        raise ValueError(MSG_INT4_RANGE.format(value=beyond))
    return torch.tensor(given, dtype=torch.int8).reshape(input.shape).to(input.device)


def _integers(dtype: str) -> torch.dtype:
    name = dtype.removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(MSG_DTYPE.format(name=dtype))
    return _DTYPES[name]


def _along(
    input: torch.Tensor, scales: Sequence[float], zero_points: Sequence[int], axis: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and zero points as tensors that broadcast to ``input``'s shape."""
    wanted = 1 if axis == -1 else input.shape[axis]
    if not len(scales) == len(zero_points) == wanted:
        text = MSG_COUNT.format(
            scales=len(scales), zeros=len(zero_points), axis=axis, wanted=wanted
        )
        raise ValueError(text)
    shape = [1] * input.dim()
    if axis != -1:
        shape[axis] = wanted
    scale = torch.tensor(list(scales), dtype=torch.float32).reshape(shape)
    zero = torch.tensor(list(zero_points), dtype=torch.int64).reshape(shape)
    return scale.to(input.device), zero.to(input.device)
