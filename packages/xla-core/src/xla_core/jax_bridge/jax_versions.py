"""Which versions of jax and jaxlib this project knows, checked before anything private of theirs is used.

The ``_jax_*`` modules ask here where the versions differ. ``docs/versions.md`` says what was run.
"""

from __future__ import annotations

import re
from typing import Final

import jax.version
import jaxlib.version

OLDEST: Final = (0, 10, 2)
"""The oldest version of jax and jaxlib with all that is used here."""

FIRST_UNKNOWN: Final = (0, 13)
"""Versions from this one on were not there to be tried."""

MSG_UNKNOWN_VERSION: Final = (
    "the xla device cannot use {name} {found}: it knows {name} {oldest} up to, not including, {unknown}; "
    'pip install "jax>={oldest},<{unknown}" "jaxlib>={oldest},<{unknown}"'
)


def parsed(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: ``0.12.0.dev1`` is ``(0, 12, 0)``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


JAX: Final = parsed(jax.version.__version__)
JAXLIB: Final = parsed(jaxlib.version.__version__)

SINCE_0_11: Final = JAX >= (0, 11)
"""jax 0.11.2 and 0.12.0 have the same private parts where they differ from 0.10.2."""

HOST_VIEWS_STAY: Final = (0, 11) <= JAXLIB < (0, 12)
"""jaxlib 0.11.2 keeps its view of an array on the CPU for as long as the array lives; 0.10.2 and 0.12.0 do not."""


def check() -> None:
    """Raise ImportError, naming the range that is known, when jax or jaxlib is outside of it."""
    for name, version in (("jax", jax.version.__version__), ("jaxlib", jaxlib.version.__version__)):
        if not OLDEST <= parsed(version) < FIRST_UNKNOWN:
            oldest, unknown = (".".join(map(str, v)) for v in (OLDEST, FIRST_UNKNOWN))
            text = MSG_UNKNOWN_VERSION.format(
                name=name, found=version, oldest=oldest, unknown=unknown
            )
            raise ImportError(text)
