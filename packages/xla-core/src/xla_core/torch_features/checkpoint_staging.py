"""Copies of ``xla`` tensors on the CPU for ``torch.distributed.checkpoint.async_save``.

It copies a state dict at the call and writes the copy to files while the training goes on. Tensors that
share a storage share one on the CPU, as copies of CPU tensors do.
"""

from __future__ import annotations

from typing import Any

import torch

from xla_core.dispatch.transfers import read
from xla_core.recording import uninitialized
from xla_core.recording.storage import chain
from xla_core.recording.xla_tensor import XLATensor, tensor_on
from xla_core.torch_bridge import torch_distributed_private


def install() -> None:
    """Let ``async_save`` copy ``xla`` tensors by ``host_copy``, from the first import of its stager on."""
    torch_distributed_private.stage_with(XLATensor, host_copy)


def host_copy(
    tensor: XLATensor, memo: dict[Any, Any], place: torch_distributed_private.Place | None = None
) -> torch.Tensor:
    """The value of ``tensor`` as a CPU tensor of its shape and dtype, without gradient history.

    ``memo`` keeps the copies of whole storages, of which the copies of views become views. ``place``
    gives a copy's storage another place, such as shared memory.
    Raises RuntimeError for an uninitialized parameter of a lazy module.
    """
    uninitialized.check_staying(tensor, torch.device("cpu"))
    s = tensor._s
    key = (host_copy, id(s))
    if key not in memo:
        memo[key] = (s, _placed(read(tensor_on(s)), place))  # s: its id stays its own
    copied = memo[key][1].detach()
    try:
        for view in chain(tensor._v):
            copied = view.plan.overload(copied, *view.args)
    except RuntimeError:  # a view that no strides describe
        return _placed(read(tensor), place)
    if copied.is_conj() or copied.is_neg():  # on the device nothing is conjugated lazily
        return _placed(read(tensor), place)
    return copied


def _placed(host: torch.Tensor, place: torch_distributed_private.Place | None) -> torch.Tensor:
    if place is None:
        return host
    storage = place(host.untyped_storage())
    return torch.empty(0, dtype=host.dtype).set_(storage, 0, host.shape, host.stride())
