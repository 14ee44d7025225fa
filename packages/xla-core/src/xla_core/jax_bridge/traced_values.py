"""Names for what crosses the border to jax, where no type says more. To a type checker all of them are ``Any``."""

from __future__ import annotations

from typing import Any, TypeAlias

TracedValue: TypeAlias = Any
"""A value that a lowered function computes with: a jax array, a tracer, a NumPy array or a number."""

Size: TypeAlias = Any
"""A length of a dimension: an int, one of jax's symbolic dimensions, or a traced integer."""

JaxObject: TypeAlias = Any
"""An object of jax's or jaxlib's without a public class: a jaxpr, an abstract value, a sharding, an executable."""
