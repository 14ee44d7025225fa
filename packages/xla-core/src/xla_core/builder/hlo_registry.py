"""The registry of a builder's operations: the function of each under jax, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

operations: Final[dict[str, Callable[..., object]]] = {}


def named(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function, on jax arrays, for the operation ``name``."""

    def register(function: Callable[..., object]) -> Callable[..., Any]:
        operations[name] = function
        return function

    return register
