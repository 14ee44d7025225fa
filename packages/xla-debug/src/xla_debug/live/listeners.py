"""Hands the core's events to the parts of this package that the environment or the user turned on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xla_debug import recompile, settings
from xla_debug.live import analysis, metrics_file, saved_graphs

Handler = Callable[[dict[str, Any]], None]

_handlers: dict[str, list[Handler]] = {}


def add(event: str, handler: Handler) -> Callable[[], None]:
    """Call ``handler(details)`` for every ``event``; returns a function that ends it."""
    _handlers.setdefault(event, []).append(handler)

    def remove() -> None:
        if handler in _handlers[event]:
            _handlers[event].remove(handler)

    return remove


def dispatch(event: str, details: dict[str, Any]) -> None:
    """The one listener that the core knows."""
    handlers = _handlers.get(event)
    if handlers:
        for handler in tuple(handlers):
            handler(details)


def _missing(details: dict[str, Any]) -> None:
    if details[
        "trace"
    ].one_by_one:  # eager mode and op-by-op: each operator is meant to be a program
        return
    recompile.on_missing(details["trace"], details["name"], details["entries"], details["outputs"])


def _made(details: dict[str, Any]) -> None:
    if details["trace"].one_by_one:
        return
    recompile.on_made(details["trace"], details["program"])


def _executed(details: dict[str, Any]) -> None:
    if details["trace"].one_by_one:
        return
    recompile.on_executed(details["trace"], details["program"])


def _step_marked(details: dict[str, Any]) -> None:
    recompile.on_step_marked(details["device"].index)


def _evicted(details: dict[str, Any]) -> None:
    recompile.on_evicted(details["program"])
    analysis.on_evicted(details["program"])


def _forgotten(details: dict[str, Any]) -> None:
    recompile.on_forgotten(details["trace"])


_started: list[bool] = []


def start() -> None:
    """Begin with the causes of compilations, and with what the environment asks for."""
    if _started:
        return
    _started.append(True)
    add("program_missing", _missing)
    add("program_compiled", _made)
    add("program_loaded", _made)
    add("program_executed", _executed)
    add("step_marked", _step_marked)
    add("program_evicted", _evicted)
    add("steps_forgotten", _forgotten)
    add("program_missing", analysis.on_missing)
    add("execution_refused", analysis.on_refused)
    if settings.level():
        _start_reports()
    if settings.SAVE_TENSORS_FILE.get():
        add("program_executed", saved_graphs.on_executed)
    if settings.METRICS_FILE.get():
        add("step_marked", metrics_file.on_step)


def _start_reports() -> None:
    add("program_compiled", analysis.on_compiled)
    add("program_executed", analysis.on_executed)
    if settings.level() >= 100:
        add("step_marked", analysis.on_step)
        add("fallback", analysis.on_fallback)
        analysis.report_at_exit()
