"""The names of torch_xla's C++ module that clients call and that have a meaning in this project.

``docs/api.md`` lists them, and ``docs/compatibility.md`` says which are missing and why.
"""

from __future__ import annotations

from torch_xla._packages import lazy_names
from xla_core.api.cpp_module.basics import *  # noqa: F403 - all of them are names of this module
from xla_core.api.cpp_module.devices import *  # noqa: F403
from xla_core.api.cpp_module.graphs import *  # noqa: F403
from xla_core.api.cpp_module.settings import *  # noqa: F403
from xla_core.api.cpp_module.tensors import *  # noqa: F403
from xla_core.builder.cpp_module_names import *  # noqa: F403
from xla_core.kernels.pallas import tpu_custom_call as _xla_tpu_custom_call
from xla_core.torch_features.custom_calls import custom_call as _xla_custom_call

_HOMES = {
    "xla_core.plugins.torch_xla_plugins": "PjRtPlugin _register_pjrt_plugin",
    "xla_debug.cpp_module_names": (
        "_clear_xla_counters _clear_xla_metrics _get_executed_fallback_ops _get_ir_debug "
        "_get_xla_tensor_debug_info _get_xla_tensors_dot _get_xla_tensors_hlo _get_xla_tensors_text "
        "_set_ir_debug _short_xla_metrics_report _xla_counter_names _xla_counter_value "
        "_xla_increment_counter _xla_metric_data _xla_metric_names _xla_tensors_report"
    ),
    "xla_dist.collectives.cpp_module_names": (
        "IrValue _get_all_reduce_token _set_all_reduce_token _xla_all_gather _xla_all_gather_coalesced "
        "_xla_all_gather_coalesced_out _xla_all_gather_out _xla_all_reduce _xla_all_reduce_inplace "
        "_xla_all_to_all _xla_collective_permute _xla_recv _xla_reduce_scatter "
        "_xla_reduce_scatter_coalesced _xla_reduce_scatter_coalesced_out _xla_reduce_scatter_out "
        "_xla_send"
    ),
    "xla_dist.processes.cpp_module_names": "_ensure_xla_coordinator_initialized",
    "xla_spmd.checkpoint.cpp_module_names": (
        "_activate_preemption_sync_manager _deactivate_preemption_sync_manager _sync_point_reached"
    ),
    "xla_spmd.tensors.cpp_module_names": (
        "OpSharding XlaShardingSpec _get_local_shard_replica_and_indices _get_local_shards "
        "_get_xla_op_sharding _get_xla_sharding_spec _get_xla_sharding_specs _get_xla_sharding_type "
        "_global_tensor_from_cpu_shards _load_local_shards _mark_manual_sharding "
        "_spmd_full_to_shard_shape _spmd_shard_to_full_shape _xla_annotate_custom_sharding "
        "_xla_clear_sharding _xla_get_auto_sharding _xla_mark_sharding _xla_set_auto_sharding "
        "_xla_spmd_all_reduce _xla_spmd_reduce_scatter"
    ),
}
__getattr__, __dir__ = lazy_names(
    __name__,
    {name: home for home, names in _HOMES.items() for name in names.split()},
    {"lowering": "xla_core.api.lowering_context", "profiler": "xla_debug.profiler_objects"},
)
