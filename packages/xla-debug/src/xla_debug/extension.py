"""What xla-core finds by entry point: attaches the package to the core's events, once, at the start."""

from __future__ import annotations

from xla_core.contract.hookspecs import hookimpl
from xla_core.extension_api import source_location
from xla_debug import memory, settings
from xla_debug.live import listeners
from xla_debug.stacks import stack_frames


@hookimpl
def xla_core_subscribe() -> None:
    """Listen to the core, as much as the environment asks for."""
    source_location.set_locator(stack_frames.locate)
    if settings.HLO_DEBUG.get():
        source_location.set_detail(source_location.Detail.LINES)
    elif source_location.detail() is source_location.Detail.NONE:
        source_location.set_detail(source_location.Detail.SCOPES)
    if settings.TRACK_MEMORY.get():
        memory.track()
    listeners.start()
    if settings.TRACK_MEMORY.get():
        memory.track()
