"""Optimization barriers: values that the compiler must not look behind."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xla_core.recording.xla_tensor import XLATensor
from xla_core.torch_bridge import op_library as op_library


def behind_barrier(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of the same values (and without history), all computed before any of them is used."""
    with torch.no_grad():
        return list(torch.ops.xla.optimization_barrier([t.detach() for t in tensors]))


def optimization_barrier_(tensors: Sequence[torch.Tensor]) -> None:
    """Put the tensors behind a barrier, in place: what uses them waits for all of them.

    The compiler neither merges computations before it with computations after it, nor moves them across.
    Tensors of other devices are left alone. Autograd does not see it.
    """
    on_device = [t for t in tensors if isinstance(t, XLATensor)]
    if not on_device:
        return
    for tensor, result in zip(on_device, behind_barrier(on_device), strict=True):
        assert isinstance(result, XLATensor)
        trace = tensor._s.trace
        with trace.lock:
            trace.write(tensor, trace.value_of(result))
