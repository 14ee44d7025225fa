"""What the core tells whoever listens: named events, emitted where something rare happens.

Times are nanoseconds. What a listener raises is raised where the event happened.

- ``program_missing(trace, name, digest, entries, outputs, aliases)``: a step that no known program
  computes; emitted before anything is lowered. Raising here refuses it, the trace stays as it was.
- ``program_compiled(trace, program, digest, entries, modules, lowering, compiling)`` and
  ``program_loaded(trace, program, digest, entries, loading)``: its program is there. ``modules`` are the
  ``Program`` objects that were compiled, one per stage.
- ``program_evicted(program)``: it was forgotten to make room for others; the next one who needs it makes
  it again.
- ``steps_forgotten(trace)``: all steps recorded on a device are about to be dropped.
- ``program_executed(trace, program, results, nanoseconds)``: a run was enqueued. ``trace`` is a copy, as it was
  before: its tensors have their values, and what is recorded now is no part of it.
- ``execution_refused(trace)``: something would run where a block forbids it
  (``torch_xla.compile(full_graph=True)``); the error is raised next.
- ``flushed(trace, operations, nanoseconds)``: what was pending was run, all of the above included.
- ``transfer_to_device(buffer, nbytes, nanoseconds)``, ``transfer_from_device(nbytes, nanoseconds,
  waited)``: ``waited`` is the part until the value was computed.
- ``waited(nanoseconds)``: the host waited for programs to finish.
- ``fallback(operator, filename, line)``: an operator runs on the CPU.
- ``step_marked(device)``: the user ended a step.

Nothing is emitted per operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = [
    "Listener",
    "emit",
    "listening",
    "subscribe",
]

Listener = Callable[[str, dict[str, Any]], None]

_listeners: list[Listener] = []


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call ``listener(name, details)`` for every event; returns a function that ends it."""
    _listeners.append(listener)

    def unsubscribe() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return unsubscribe


def emit(name: str, /, **details: Any) -> None:
    """Tell all listeners; costs one test of an empty list when there are none."""
    for listener in tuple(_listeners):
        listener(name, details)


def listening() -> bool:
    """Whether anybody listens, for details that cost something to find out."""
    return bool(_listeners)
