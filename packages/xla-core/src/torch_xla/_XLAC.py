"""The names of torch_xla's C++ module that clients call, as far as they exist here."""

from __future__ import annotations

from typing import Any

import torch

from xla_core import counters, model_api
from xla_core.tensor import XLATensor


def _xla_metrics_report() -> str:
    """The metrics report, as ``torch_xla.debug.metrics.metrics_report()`` gives it."""
    return counters.report()


def _xla_get_default_device() -> str:
    """The calling thread's current device, as text."""
    return str(model_api.device())


def _xla_get_tensor_id(tensor: Any) -> int:
    """A number that tensors sharing a storage have in common, and no others do while they live."""
    if not isinstance(tensor, XLATensor):
        raise RuntimeError(f"Input tensor is not an XLA tensor: {torch.Tensor.type(tensor)}")
    return id(tensor._s)
