"""The names of torch_xla's C++ module that clients call, as far as they exist here."""

from __future__ import annotations

from typing import Any

import torch

from torch_xla._packages import lazy_names
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


__getattr__ = lazy_names(
    "torch_xla._XLAC",
    {
        "_get_local_shard_replica_and_indices": "xla_spmd.names",
        "_get_local_shards": "xla_spmd.names",
        "_get_xla_sharding_spec": "xla_spmd.names",
        "_get_xla_sharding_specs": "xla_spmd.names",
        "_get_xla_sharding_type": "xla_spmd.names",
        "_xla_clear_sharding": "xla_spmd.names",
        "_get_xla_tensors_text": "xla_debug.xlac",
        "_get_xla_tensors_dot": "xla_debug.xlac",
        "_get_xla_tensors_hlo": "xla_debug.xlac",
        "_get_xla_tensor_debug_info": "xla_debug.xlac",
        "_get_graph_hash": "xla_debug.xlac",
        "_set_ir_debug": "xla_debug.xlac",
        "_get_ir_debug": "xla_debug.xlac",
        "_short_xla_metrics_report": "xla_debug.xlac",
        "_xla_counter_names": "xla_debug.xlac",
        "_xla_counter_value": "xla_debug.xlac",
        "_xla_metric_names": "xla_debug.xlac",
        "_xla_metric_data": "xla_debug.xlac",
        "_xla_increment_counter": "xla_debug.xlac",
        "_clear_xla_counters": "xla_debug.xlac",
        "_clear_xla_metrics": "xla_debug.xlac",
        "_get_executed_fallback_ops": "xla_debug.xlac",
    },
)
