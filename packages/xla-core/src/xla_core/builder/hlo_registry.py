"""The registry of a builder's operations: the function of each under jax, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

F = TypeVar("F", bound=Callable[..., object])

operations: Final[dict[str, Callable[..., object]]] = {}


def named(name: str) -> Callable[[F], F]:
    """Register the decorated function, on jax arrays, for the operation ``name``."""

    def register(function: F) -> F:
        operations[name] = function
        return function

    return register
