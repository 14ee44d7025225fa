"""torch_xla.debug.frame_parser_util: summarizes the call stacks of CPU fallbacks, from the package xla-debug."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "create_report": "xla_debug.live.saved_frames",
        "parse_frame_content": "xla_debug.live.saved_frames",
        "parse_frames": "xla_debug.live.saved_frames",
        "process_frames": "xla_debug.live.saved_frames",
    },
)
