"""Names for values whose types a type checker cannot know here, because somebody else defines them.

To a type checker all of them are ``Any``. Each is named once, for what it is: here where neither PyTorch nor jax is
involved, in ``torch_bridge.operands`` for PyTorch's, and in ``jax_bridge.traced_values`` for jax's. No other module
uses ``Any``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = [
    "AnyFunction",
    "Attribute",
    "CoreEntry",
    "CoreProgram",
    "CoreTrace",
    "ForeignObject",
    "JsonObject",
    "JsonValue",
]

AnyFunction: TypeAlias = Callable[..., Any]
"""A function of somebody else's: its own signature says what it takes and returns."""

Attribute: TypeAlias = Any
"""What ``__getattr__`` returns for an object that it stands for."""

CoreEntry: TypeAlias = Any
"""An ``Entry`` of a recorded step (``extension_api.steps``), in modules that cannot import the class."""

CoreProgram: TypeAlias = Any
"""A ``StepProgram`` (``extension_api.programs``), in modules that cannot import the class."""

CoreTrace: TypeAlias = Any
"""A ``Trace`` (``extension_api.steps``), in modules that cannot import the class."""

ForeignObject: TypeAlias = Any
"""An object whose class cannot be imported (a higher layer's, a library's, a user's): used by its attributes."""

JsonValue: TypeAlias = Any
"""What ``json.loads`` returns: None, a bool, a number, a string, a list or a dict of them."""

JsonObject: TypeAlias = dict[str, JsonValue]
"""An object of JSON: a dict with strings for keys."""
