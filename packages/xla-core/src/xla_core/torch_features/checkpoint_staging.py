"""Copies of ``xla`` tensors on the CPU for ``torch.distributed.checkpoint.async_save``.

``async_save`` copies a state dict when it is called, and writes the copy to files while the training goes on.
Tensors that share a storage on the device share one on the CPU.
"""

from __future__ import annotations

import torch

from xla_core.dispatch.transfers import read
from xla_core.recording import uninitialized
from xla_core.recording.storage import chain
from xla_core.recording.xla_tensor import XLATensor, tensor_on
from xla_core.torch_bridge import torch_distributed_private
from xla_core.torch_bridge.operands import TorchObject


def install() -> None:
    """Make ``async_save`` copy ``xla`` tensors by ``host_copy``, once torch's module that stages is imported."""
    torch_distributed_private.stage_with(XLATensor, host_copy)


def host_copy(
    tensor: XLATensor,
    memo: dict[object, TorchObject],
    place: torch_distributed_private.Place | None = None,
) -> torch.Tensor:
    """The value of ``tensor`` as a CPU tensor of its shape and dtype, without gradient history.

    ``memo`` keeps the copies of whole storages; copies of views are views of these. ``place`` (default: none) moves
    the storage of a copy, for example to shared memory.
    Raises RuntimeError for an uninitialized parameter of a lazy module.
    """
    uninitialized.check_staying(tensor, torch.device("cpu"))
    s = tensor._s
    key = (host_copy, id(s))
    if key not in memo:
        memo[key] = (s, _placed(read(tensor_on(s)), place))  # s is kept because its id is the key
    copied = memo[key][1].detach()
    try:
        for view in chain(tensor._v):
            copied = view.plan.overload(copied, *view.args)
    except RuntimeError:  # the view cannot be described by strides
        return _placed(read(tensor), place)
    if copied.is_conj() or copied.is_neg():  # tensors on xla have no such bits
        return _placed(read(tensor), place)
    return copied


def _placed(host: torch.Tensor, place: torch_distributed_private.Place | None) -> torch.Tensor:
    if place is None:
        return host
    storage = place(host.untyped_storage())
    return torch.empty(0, dtype=host.dtype).set_(storage, 0, host.shape, host.stride())
