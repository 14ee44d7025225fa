"""Compiler options that not every jaxlib has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from xla_core.jax_bridge import pjrt_c_api

__all__ = ["Options", "with_known_options"]

Options = Mapping[str, str | int | float | bool]
_Result = TypeVar("_Result")

_unknown: Final[set[str]] = set()


def with_known_options(compile: Callable[[Options], _Result], options: Options) -> _Result:
    """What ``compile`` makes with those of ``options`` that the installed jaxlib has.

    XLA's debug options are no interface: another jaxlib may be without one, and has the others. XLA names
    the first that it does not know, and that one is left out in this process from then on. Raises what
    ``compile`` raises for any other reason, and for an option that is not in ``options``.
    """
    while True:
        known = {name: value for name, value in options.items() if name not in _unknown}
        try:
            return compile(known)
        except RuntimeError as error:
            unknown = pjrt_c_api.unknown_option(error)
            if unknown not in known:
                raise
            _unknown.add(unknown)
