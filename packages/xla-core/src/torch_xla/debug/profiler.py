"""torch_xla.debug.profiler (xp): profiles for TensorBoard and Perfetto, from the package xla-debug."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "start_server": "xla_debug.profiler",
        "stop_server": "xla_debug.profiler",
        "trace": "xla_debug.profiler",
        "trace_detached": "xla_debug.profiler",
        "start_trace": "xla_debug.profiler",
        "stop_trace": "xla_debug.profiler",
        "Trace": "xla_debug.profiler",
        "StepTrace": "xla_debug.profiler",
        "trace_me": "xla_debug.profiler",
        "maybe_get_jax": "xla_core.torch_features.jax_coexistence",
        "get_tracer_marked_step": "xla_debug.profiler",
        "set_tracer_marked_step": "xla_debug.profiler",
    },
)
