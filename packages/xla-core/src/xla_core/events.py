"""What the core tells whoever listens: named events, emitted where something rare happens.

Events: ``program_compiled(program, entries)``, ``program_loaded(program, entries)``,
``program_executed(program)``, ``transfer_to_device(nbytes)``, ``transfer_from_device(nbytes)``,
``fallback(operator, filename, line)``, ``step_marked(device)``. Nothing is emitted per operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Listener = Callable[[str, dict[str, Any]], None]

_listeners: list[Listener] = []


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call ``listener(name, details)`` for every event; returns a function that ends it."""
    _listeners.append(listener)

    def unsubscribe() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return unsubscribe


def emit(name: str, **details: Any) -> None:
    """Tell all listeners; costs one test of an empty list when there are none."""
    for listener in tuple(_listeners):
        listener(name, details)


def listening() -> bool:
    """Whether anybody listens, for details that cost something to find out."""
    return bool(_listeners)
