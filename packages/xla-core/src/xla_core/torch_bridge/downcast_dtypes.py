"""The number formats of values in device memory, where the user asks for others than PyTorch's.

The rules are torch_xla's (pytorch-on-xla-devices, "XLA Tensors and bFloat16"): a tensor always reports
its PyTorch dtype, and takes it again when it comes back to the CPU. What a device does not have at
all (float64 on a TPU) its plugin replaces itself, after these rules.

| environment | float32 | float64 | int64 |
|---|---|---|---|
| ``XLA_USE_BF16`` (or ``LTC_USE_BF16``) | bfloat16 | bfloat16 | |
| ``XLA_DOWNCAST_BF16`` | bfloat16 | float32 | |
| ``XLA_USE_32BIT_LONG`` | | | int32 (uint64: uint32) |

Numbers that a step takes as arguments (learning rates, seeds) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import ml_dtypes
import numpy as np

from xla_core.support import flags

_BF16: Final = np.dtype(ml_dtypes.bfloat16)
_F32: Final = np.dtype(np.float32)
_F64: Final = np.dtype(np.float64)

Format = Callable[[np.dtype], np.dtype]


def chosen() -> Mapping[np.dtype, np.dtype]:
    """What the environment replaces, and by what; empty when nothing is asked for."""
    formats: dict[np.dtype, np.dtype] = {}
    if flags.USE_BF16.get() or flags.LTC_USE_BF16.get():
        formats |= {_F32: _BF16, _F64: _BF16}
    elif flags.DOWNCAST_BF16.get():
        formats |= {_F32: _BF16, _F64: _F32}
    if flags.USE_32BIT_LONG.get():
        formats |= {
            np.dtype(np.int64): np.dtype(np.int32),
            np.dtype(np.uint64): np.dtype(np.uint32),
        }
    return formats


def device_format(formats: Mapping[np.dtype, np.dtype], device: Format) -> Format:
    """How a device whose plugin maps dtypes with ``device`` keeps a dtype under ``formats``."""
    formats_kept: dict[np.dtype, np.dtype] = {}

    def keep(dtype: np.dtype) -> np.dtype:
        format_of = formats_kept.get(dtype)
        if format_of is None:
            format_of = formats_kept[dtype] = device(formats.get(dtype, dtype))
        return format_of

    return keep
