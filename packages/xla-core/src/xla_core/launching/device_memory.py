"""Copies between ``xla`` tensors and another library's tensors in the same device's memory, through DLPack.

It is meant for CUDA PyTorch and ``xla`` tensors on the same GPU. The two have separate allocators, so values must
be copied, but a copy on the device takes a thousandth of the time of one through the host.
"""

from __future__ import annotations

from typing import Final

import torch

from xla_core.contract.device_protocol import Buffer, Exchange, capabilities_of
from xla_core.launching.launch_queue import value_of
from xla_core.recording.storage import Backend
from xla_core.support import counters
from xla_core.torch_bridge import dtypes

# Dtypes that DLPack can express and that both PyTorch and XLA read.
_EXCHANGED: Final = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
})  # fmt: skip


def reaches(backend: Backend, device: torch.device) -> bool:
    """Whether values of ``backend`` can be copied to ``device`` without passing through the host."""
    return _exchange(backend, device) is not None


def take(tensor: torch.Tensor, backend: Backend) -> Buffer | None:
    """A buffer with the values of a tensor on another device; None if they must pass through the host."""
    exchange = _exchange(backend, tensor.device)
    if exchange is None or not _same_format(tensor.dtype, backend):
        return None
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    try:
        buffer = exchange.take(plain, backend.placement)
    except BufferError:
        return None
    counters.increment("DlpackToDevice")
    return buffer


def give(buffer: Buffer, dtype: torch.dtype, backend: Backend) -> torch.Tensor | None:
    """A tensor in PyTorch's own memory with a buffer's values; None if they must pass through the host."""
    exchange = capabilities_of(backend.client).exchange
    if exchange is None or not _same_format(dtype, backend):
        return None
    try:
        shown = torch.from_dlpack(exchange.give(value_of(buffer)))
    except BufferError:
        return None
    copied = shown.clone()
    # XLA may reuse the memory as soon as ``shown`` is gone, and does not know about PyTorch's copy
    stream = torch.get_device_module(copied.device).current_stream(copied.device)
    finish = getattr(stream, "synchronize", None)  # the CPU's streams have none
    if finish is not None:
        finish()
    counters.increment("DlpackFromDevice")
    return copied


def _exchange(backend: Backend, device: torch.device) -> Exchange | None:
    """The DLPack exchange of a backend with tensors on ``device``; None if there is none, or over a mesh."""
    exchange = capabilities_of(backend.client).exchange
    one = len(backend.placement.devices) == 1 and backend.placement.sharding is None
    return exchange if exchange is not None and exchange.device == device.type and one else None


def _same_format(dtype: torch.dtype, backend: Backend) -> bool:
    """Whether the device keeps ``dtype`` unchanged, and DLPack can express it."""
    if dtype not in _EXCHANGED:
        return False
    kept = dtypes.numpy_dtype(dtype)
    return bool(backend.numpy_dtype(kept) == kept)
