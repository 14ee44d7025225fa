"""DLPack: exchanges values of ``xla`` tensors with other array libraries.

Values are copied: an ``xla`` tensor exposes no memory, as its storage gets another buffer in each step.
"""

from __future__ import annotations

import torch

from xla_core.dispatch.transfers import read
from xla_core.recording.xla_tensor import XLATensor

MSG_NOT_XLA = "to_dlpack takes a tensor on an xla device, got {got}; use torch.utils.dlpack"


def to_dlpack(xla_tensor: torch.Tensor) -> object:
    """A DLPack capsule with a copy of the tensor's values on the CPU.

    A pending value is computed first. Raises TypeError for a tensor on another device.
    """
    if not isinstance(xla_tensor, XLATensor):
        got = getattr(xla_tensor, "device", type(xla_tensor).__name__)
        raise TypeError(MSG_NOT_XLA.format(got=got))
    return torch.utils.dlpack.to_dlpack(read(xla_tensor.detach()).clone())


def from_dlpack(ext_tensor: object) -> torch.Tensor:
    """A tensor on the current ``xla`` device with the values of a DLPack capsule, or of an object that has one."""
    return torch.utils.dlpack.from_dlpack(ext_tensor).to("xla")
