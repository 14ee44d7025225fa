"""Whether one more run of a program could harm anybody, as its StableHLO and its HLO tell."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

MOST_ITERATIONS: Final = 8
"""Of a loop that is no reason to wait for: those of jax's random numbers have five."""

_BYTECODE: Final = b"ML\xefR"
# In MLIR's bytecode an operation is named, without its dialect, by one of the NUL-terminated strings
# at the end. An equal string that names something else is a false alarm.
_STRANGERS: Final = tuple(
    name.encode() + b"\0"
    for name in (
        "custom_call",  # kernels and callbacks, which only their names tell apart
        "infeed", "outfeed", "send", "recv",
        "all_gather", "all_reduce", "all_to_all", "reduce_scatter",
        "collective_broadcast", "collective_permute",
    )
)  # fmt: skip
_LOOP: Final = b"while\0"
_ITERATIONS: Final = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def only_computes(stablehlo: bytes, optimized_hlo: Callable[[], str]) -> bool:
    """Whether a run surely ends, and acts on nothing but the program's results.

    ``optimized_hlo`` gives the text of what was compiled; it is asked only about loops. False for
    what is not MLIR bytecode of the StableHLO and CHLO dialects, and when in doubt.
    """
    if not stablehlo.startswith(_BYTECODE) or b"vhlo\0" in stablehlo:
        return False
    if any(name in stablehlo for name in _STRANGERS):
        return False
    return _LOOP not in stablehlo or loops_are_short(optimized_hlo())


def loops_are_short(hlo: str) -> bool:
    """Whether XLA knows of every loop how often it runs, and that this is at most ``MOST_ITERATIONS``."""
    counts = [_ITERATIONS.search(line) for line in hlo.splitlines() if " while(" in line]
    return all(found and int(found[1]) <= MOST_ITERATIONS for found in counts)
