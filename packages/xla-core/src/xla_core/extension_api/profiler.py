"""The runtime's profiler: sessions, a server, spans."""

from __future__ import annotations

from xla_core.jax_bridge.jax_private import (
    profiler_export,
    profiler_server,
    profiler_session,
    trace_me,
)

__all__ = [
    "profiler_export",
    "profiler_server",
    "profiler_session",
    "trace_me",
]
