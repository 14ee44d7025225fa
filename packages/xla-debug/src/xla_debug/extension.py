"""The hook by which xla-core calls this package at the start: it subscribes to the core's events."""

from __future__ import annotations

from xla_core.contract.hookspecs import hookimpl
from xla_core.extension_api import source_location
from xla_debug import memory, settings
from xla_debug.live import listeners
from xla_debug.stacks import stack_frames


@hookimpl
def xla_core_subscribe() -> None:
    """Subscribe to the core's events, as far as the environment variables require."""
    source_location.set_locator(stack_frames.locate)
    if settings.HLO_DEBUG.get():
        source_location.set_detail(source_location.Detail.LINES)
    elif source_location.detail() is source_location.Detail.NONE:
        source_location.set_detail(source_location.Detail.SCOPES)
    if settings.TRACK_MEMORY.get():
        memory.track()
    listeners.start()
