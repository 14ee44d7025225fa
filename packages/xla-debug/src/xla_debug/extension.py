"""What xla-core finds by entry point: attaches the package to the core's events, once, at the start."""

from __future__ import annotations

from typing import Any

from xla_core import where
from xla_core.hookspecs import hookimpl
from xla_debug import listeners, places, settings


@hookimpl
def xla_core_subscribe(events: Any) -> None:
    """Listen to the core, as much as the environment asks for."""
    where.set_locator(places.locate)
    if settings.HLO_DEBUG.get():
        where.set_detail(where.Detail.LINES)
    elif where.detail() is where.Detail.NONE:
        where.set_detail(where.Detail.SCOPES)
    events.subscribe(listeners.dispatch)
    listeners.start()
