"""Where in the user's program an operation was recorded: an extension may say it, and others read it."""

from __future__ import annotations

from typing import Final

from xla_core.recording.source_location import (
    Detail,
    Frame,
    SourceLocation,
    detail,
    set_detail,
    set_locator,
)

__all__ = [
    "COMPILED_GRAPH_MODULE",
    "COMPILE_MODULE",
    "Detail",
    "Frame",
    "SIZE_MODULES",
    "SourceLocation",
    "detail",
    "set_detail",
    "set_locator",
]

# By name: importing the first would import torch.compile's machinery.
COMPILED_GRAPH_MODULE: Final = "xla_core.dynamo.compiled_graph"
"""The module whose frames are those of a graph of ``torch.compile`` that is recorded or runs."""
COMPILE_MODULE: Final = "xla_core.api.compile_decorator"
"""The module whose frames are those of ``torch_xla.compile``."""
SIZE_MODULES: Final = ("xla_core.dispatch.inspected", "xla_core.dispatch.host_length_operands")
"""The modules whose frames are those of operators that read from the device how large their result is."""
