"""The names of torch_xla's C++ module that clients call, as far as they exist here."""

from __future__ import annotations

from torch_xla._packages import lazy_names
from xla_core.api.xlac import (
    _check_tensor_need_materialization as _check_tensor_need_materialization,
)
from xla_core.api.xlac import _get_buffer_donation as _get_buffer_donation
from xla_core.api.xlac import _get_xla_tensor_dimension_size as _get_xla_tensor_dimension_size
from xla_core.api.xlac import _init_computation_client as _init_computation_client
from xla_core.api.xlac import _is_placecholder as _is_placecholder
from xla_core.api.xlac import _set_buffer_donation as _set_buffer_donation
from xla_core.api.xlac import _unsafe_buffer_pointer as _unsafe_buffer_pointer
from xla_core.api.xlac import (
    _xla_computation_cache_is_initialized as _xla_computation_cache_is_initialized,
)
from xla_core.api.xlac import _xla_device_kind as _xla_device_kind
from xla_core.api.xlac import _xla_get_default_device as _xla_get_default_device
from xla_core.api.xlac import _xla_get_devices as _xla_get_devices
from xla_core.api.xlac import _xla_get_mat_mul_precision as _xla_get_mat_mul_precision
from xla_core.api.xlac import _xla_get_tensor_id as _xla_get_tensor_id
from xla_core.api.xlac import _xla_mark_dynamic as _xla_mark_dynamic
from xla_core.api.xlac import _xla_metrics_report as _xla_metrics_report
from xla_core.api.xlac import _xla_real_devices as _xla_real_devices
from xla_core.api.xlac import _xla_runtime_is_initialized as _xla_runtime_is_initialized
from xla_core.api.xlac import _xla_set_mat_mul_precision as _xla_set_mat_mul_precision
from xla_core.api.xlac import _xla_step_marker as _xla_step_marker
from xla_core.api.xlac import _xla_sync_multi as _xla_sync_multi
from xla_core.api.xlac import _xla_user_computation as _xla_user_computation
from xla_core.api.xlac import _xla_wait_device_ops as _xla_wait_device_ops
from xla_core.api.xlac import _xla_warm_up_cache as _xla_warm_up_cache
from xla_core.kernels.pallas import tpu_custom_call as _xla_tpu_custom_call
from xla_core.torch_features.custom_calls import custom_call as _xla_custom_call

__getattr__, __dir__ = lazy_names(
    "torch_xla._XLAC",
    {
        "_get_local_shard_replica_and_indices": "xla_spmd.tensors.cpp_module_names",
        "_get_local_shards": "xla_spmd.tensors.cpp_module_names",
        "_get_xla_sharding_spec": "xla_spmd.tensors.cpp_module_names",
        "_get_xla_sharding_specs": "xla_spmd.tensors.cpp_module_names",
        "_get_xla_sharding_type": "xla_spmd.tensors.cpp_module_names",
        "_xla_clear_sharding": "xla_spmd.tensors.cpp_module_names",
        "_get_xla_tensors_text": "xla_debug.cpp_module_names",
        "_get_xla_tensors_dot": "xla_debug.cpp_module_names",
        "_get_xla_tensors_hlo": "xla_debug.cpp_module_names",
        "_get_xla_tensor_debug_info": "xla_debug.cpp_module_names",
        "_get_graph_hash": "xla_debug.cpp_module_names",
        "_set_ir_debug": "xla_debug.cpp_module_names",
        "_get_ir_debug": "xla_debug.cpp_module_names",
        "_short_xla_metrics_report": "xla_debug.cpp_module_names",
        "_xla_counter_names": "xla_debug.cpp_module_names",
        "_xla_counter_value": "xla_debug.cpp_module_names",
        "_xla_metric_names": "xla_debug.cpp_module_names",
        "_xla_metric_data": "xla_debug.cpp_module_names",
        "_xla_increment_counter": "xla_debug.cpp_module_names",
        "_clear_xla_counters": "xla_debug.cpp_module_names",
        "_clear_xla_metrics": "xla_debug.cpp_module_names",
        "_get_executed_fallback_ops": "xla_debug.cpp_module_names",
    },
)
