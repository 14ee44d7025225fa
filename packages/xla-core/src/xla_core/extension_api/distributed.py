"""What ``torch.distributed`` needs in addition to its public functions: process groups, meshes, finished work."""

from __future__ import annotations

from xla_core.torch_bridge.error_texts import is_lost_connection
from xla_core.torch_bridge.torch_distributed_private import (
    draw_for_dtensors_with,
    finished_work,
    fsspec_reader,
    fsspec_writer,
    give_meshes_groups,
    process_group,
    record_nothing_of,
    recorded_calls,
)

__all__ = [
    "draw_for_dtensors_with",
    "finished_work",
    "fsspec_reader",
    "fsspec_writer",
    "give_meshes_groups",
    "is_lost_connection",
    "process_group",
    "record_nothing_of",
    "recorded_calls",
]
