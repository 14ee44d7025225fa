"""PyTorch's switches for how exactly a GPU multiplies float32: in full, or as TF32 (10 bits of mantissa)."""

from __future__ import annotations

import torch

# torch 2.13.0: what torch.backends.cuda.matmul.fp32_precision and cudnn.conv.fp32_precision read, in a tenth
# of their time. ``allow_tf32`` and ``set_float32_matmul_precision`` write the same settings.
_setting = torch._C._get_fp32_precision_getter


def tf32_allowed() -> tuple[bool, bool]:
    """Whether products of matrices may be TF32, and whether convolutions may.

    As PyTorch begins, convolutions may (``torch.backends.cudnn.allow_tf32``) and products may not.
    """
    return _setting("cuda", "matmul") == "tf32", _setting("cuda", "conv") == "tf32"
