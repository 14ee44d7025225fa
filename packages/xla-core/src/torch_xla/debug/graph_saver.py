"""torch_xla.debug.graph_saver: saves recorded graphs to files, from the package xla-debug."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "save_tensors_graph": "xla_debug.live.saved_graphs",
    },
)
