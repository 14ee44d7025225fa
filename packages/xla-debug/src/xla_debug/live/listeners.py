"""Passes the core's events to the parts of this package that are always on or that the environment turns on."""

from __future__ import annotations

from collections.abc import Callable

from xla_core.contract import events
from xla_core.contract.events import subscribe
from xla_debug import recompile, settings
from xla_debug.live import analysis, metrics_file, saved_graphs

Made = events.ProgramCompiled | events.ProgramLoaded


def _missing(event: events.ProgramMissing) -> None:
    if event.trace.eager_flush:  # in eager and op-by-op mode, each operator is a program on purpose
        return
    recompile.on_missing(event.trace, event.name, event.entries, event.outputs)


def _made(event: Made) -> None:
    if event.trace.eager_flush:
        return
    recompile.on_made(event.trace, event.program)


def _requested(event: events.RunRequested) -> None:
    if event.trace.eager_flush:
        return
    recompile.on_requested(event.trace, event.program)


def _step_marked(event: events.StepMarked) -> None:
    recompile.on_step_marked(event.device.index)


def _evicted(event: events.ProgramEvicted) -> None:
    recompile.on_evicted(event.program)
    analysis.on_evicted(event.program)


def _forgotten(event: events.StepsForgotten) -> None:
    recompile.on_forgotten(event.trace)


_undo: list[Callable[[], None]] = []


def start() -> None:
    """Subscribe to the events for explanations of compilations, and for what the environment turns on.

    Later calls do nothing.
    """
    if _undo:
        return
    _listen(events.ProgramMissing, _missing)
    _listen(events.ProgramCompiled, _made)
    _listen(events.ProgramLoaded, _made)
    _listen(events.RunRequested, _requested)
    _listen(events.StepMarked, _step_marked)
    _listen(events.ProgramEvicted, _evicted)
    _listen(events.StepsForgotten, _forgotten)
    _listen(events.ProgramMissing, analysis.on_missing)
    _listen(events.ExecutionRefused, analysis.on_refused)
    if settings.level():
        _start_reports()
    if settings.SAVE_TENSORS_FILE.get():
        _listen(events.ProgramMissing, saved_graphs.on_missing)
        _listen(events.ProgramExecuted, saved_graphs.on_executed)
        _listen(events.ProgramEvicted, saved_graphs.on_evicted)
        _listen(events.StepsForgotten, saved_graphs.on_forgotten)
    if settings.METRICS_FILE.get():
        _listen(events.StepMarked, metrics_file.on_step)


def _start_reports() -> None:
    _listen(events.ProgramCompiled, analysis.on_compiled)
    _listen(events.ProgramExecuted, analysis.on_executed)
    if settings.level() >= 100:
        _listen(events.StepMarked, analysis.on_step)
        _listen(events.Fallback, analysis.on_fallback)
        analysis.report_at_exit()


def _listen(kind: type[events.E], listener: Callable[[events.E], None]) -> None:
    _undo.append(subscribe(kind, listener))


def stop() -> None:
    """Undo ``start``."""
    while _undo:
        _undo.pop()()
