"""Optimization barriers, across which the compiler neither moves nor merges computations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xla_core.recording.xla_tensor import XLATensor
from xla_core.torch_bridge import op_library as op_library


def behind_barrier(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors with the same values and no autograd history; all are computed before any of them is used."""
    with torch.no_grad():
        return list(torch.ops.xla.optimization_barrier([t.detach() for t in tensors]))


def optimization_barrier_(tensors: Sequence[torch.Tensor]) -> None:
    """Put the tensors behind one barrier, in place: all are computed before any of them is used.

    The compiler neither merges computations before the barrier with computations after it, nor moves them across
    it. Tensors on other devices are not changed. Autograd does not record the change.
    """
    on_device = [t for t in tensors if isinstance(t, XLATensor)]
    if not on_device:
        return
    for tensor, result in zip(on_device, behind_barrier(on_device), strict=True):
        assert isinstance(result, XLATensor)
        trace = tensor._s.trace
        with trace.lock:
            trace.write(tensor, trace.value_of(result))
