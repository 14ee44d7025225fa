"""torch_xla.debug.model_comparator: compares the values of two runs, from the package xla-debug."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "configure": "xla_debug.model_comparator",
        "save": "xla_debug.model_comparator",
        "compare": "xla_debug.model_comparator",
        "compare_tensors": "xla_debug.model_comparator",
        "tensor_file_compare": "xla_debug.model_comparator",
    },
)
