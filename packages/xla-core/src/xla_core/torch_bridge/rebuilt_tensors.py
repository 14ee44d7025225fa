"""What ``torch.load`` knows of the tensor that it rebuilds, beyond what it passes to operators."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Final

import torch

_REBUILD: Final = torch._utils._rebuild_tensor_v2.__code__
# Frames of torch's and of ours between that function and the handler of ``set_``.
_MOST_FRAMES: Final = 12


def take_lazy_bits() -> tuple[bool, bool]:
    """Whether the tensor that ``torch.load`` rebuilds now is conjugated, and whether it is negated.

    PyTorch saves the memory of ``x.conj()`` as that of ``x``, with a note, and sets a bit in the C++ part of the
    loaded tensor. A tensor on ``xla`` has no such bit, so the notes are removed, and the caller makes the view.
    """
    # torch 2.11 to 2.15: the notes are the argument ``metadata`` of the function that rebuilds a tensor
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        if frame.f_code is _REBUILD:
            notes = frame.f_locals.get("metadata") or {}
            return bool(notes.pop("conj", False)), bool(notes.pop("neg", False))
        frame = frame.f_back
    return False, False
