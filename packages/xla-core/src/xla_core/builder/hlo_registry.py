"""The operations that a builder knows, by name: what each computes, under jax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

operations: Final[dict[str, Callable[..., object]]] = {}


def named(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the decorated function, of jax arrays, what the operation ``name`` computes."""

    def register(function: Callable[..., object]) -> Callable[..., Any]:
        operations[name] = function
        return function

    return register
