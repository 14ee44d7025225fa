"""The debugging names of torch_xla's C++ module ``_XLAC``."""

from __future__ import annotations

from xla_core.support.counters import clear_counters as _clear_xla_counters
from xla_core.support.counters import clear_metrics as _clear_xla_metrics
from xla_core.support.counters import increment as _xla_increment_counter
from xla_debug.metrics import counter_names as _xla_counter_names
from xla_debug.metrics import counter_value as _xla_counter_value
from xla_debug.metrics import executed_fallback_ops as _get_executed_fallback_ops
from xla_debug.metrics import metric_data as _xla_metric_data
from xla_debug.metrics import metric_names as _xla_metric_names
from xla_debug.metrics import short_metrics_report as _short_xla_metrics_report
from xla_debug.steps.graphs import ir_debug as _get_ir_debug
from xla_debug.steps.graphs import set_ir_debug as _set_ir_debug
from xla_debug.steps.graphs import tensor_debug_info as _get_xla_tensor_debug_info
from xla_debug.steps.graphs import tensors_dot as _get_xla_tensors_dot
from xla_debug.steps.graphs import tensors_hlo as _get_xla_tensors_hlo
from xla_debug.steps.graphs import tensors_report as _xla_tensors_report
from xla_debug.steps.graphs import tensors_text as _get_xla_tensors_text

__all__ = [
    "_clear_xla_counters", "_clear_xla_metrics", "_get_executed_fallback_ops",
    "_get_ir_debug", "_get_xla_tensor_debug_info", "_get_xla_tensors_dot", "_get_xla_tensors_hlo",
    "_get_xla_tensors_text", "_set_ir_debug", "_short_xla_metrics_report", "_xla_counter_names",
    "_xla_counter_value", "_xla_increment_counter", "_xla_metric_data", "_xla_metric_names",
    "_xla_tensors_report",
]  # fmt: skip
