"""Whether one more run of a program could harm anybody, as its StableHLO and its HLO tell."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from xla_core.jax_bridge import jax_private

__all__ = [
    "MOST_ITERATIONS",
    "loops_are_short",
    "only_computes",
]

MOST_ITERATIONS: Final = 8
"""Of a loop that is no reason to wait for: those of jax's random numbers have five."""

_BYTECODE: Final = b"ML\xefR"
# What only computes and ends. An operation that is not among these may talk to others (collectives, infeed),
# run anybody's code (custom_call), or be new: it is not known what it does.
_HARMLESS: Final = frozenset({
    "builtin.module", "func.func", "func.return", "func.call",
    *(
        f"stablehlo.{name}"
        for name in (
            "abs", "add", "and", "atan2", "batch_norm_grad", "batch_norm_inference",
            "batch_norm_training", "bitcast_convert", "broadcast", "broadcast_in_dim", "case", "cbrt",
            "ceil", "cholesky", "clamp", "compare", "complex", "composite", "concatenate", "constant",
            "convert", "convolution", "cosine", "count_leading_zeros", "create_token", "after_all",
            "divide", "dot", "dot_general", "dynamic_broadcast_in_dim", "dynamic_gather",
            "dynamic_iota", "dynamic_pad", "dynamic_reshape", "dynamic_slice", "dynamic_update_slice",
            "exponential", "exponential_minus_one", "fft", "floor", "gather", "get_dimension_size",
            "get_tuple_element", "if", "imag", "iota", "is_finite", "log", "log_plus_one", "logistic",
            "map", "maximum", "minimum", "multiply", "negate", "not", "optimization_barrier", "or",
            "pad", "partition_id", "popcnt", "power", "real", "real_dynamic_slice", "reduce",
            "reduce_precision", "reduce_window", "remainder", "replica_id", "reshape", "return",
            "reverse", "rng_bit_generator", "round_nearest_afz", "round_nearest_even", "rsqrt",
            "scatter", "select", "select_and_scatter", "shift_left", "shift_right_arithmetic",
            "shift_right_logical", "sign", "sine", "slice", "sort", "sqrt", "subtract", "tan", "tanh",
            "transpose", "triangular_solve", "tuple", "while", "xor",
        )
    ),
})  # fmt: skip
_HARMLESS_DIALECT: Final = "chlo."  # functions of mathematics, all of it
_LOOP: Final = "stablehlo.while"
_ITERATIONS: Final = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_WHILE: Final = re.compile(r"(?<![\w%.-])while(?![\w.-])")


def only_computes(stablehlo: bytes, optimized_hlo: Callable[[], str]) -> bool:
    """Whether a run surely ends, and acts on nothing but the program's results.

    ``optimized_hlo`` gives the text of what was compiled; it is asked only about loops. False for
    what is not MLIR bytecode of operations that are known to be harmless, and when in doubt.
    """
    if not stablehlo.startswith(_BYTECODE):
        return False
    names = jax_private.operation_names(stablehlo)
    if not names:
        return False
    if not all(name in _HARMLESS or name.startswith(_HARMLESS_DIALECT) for name in names):
        return False
    return _LOOP not in names or loops_are_short(optimized_hlo())


def loops_are_short(hlo: str) -> bool:
    """Whether XLA knows of every loop how often it runs, and that this is at most ``MOST_ITERATIONS``.

    False for what does not look like HLO of jaxlib 0.10.2.
    """
    if "\nENTRY %" not in hlo:
        return False
    for line in hlo.splitlines():
        # what a loop is named after, and what XLA notes of it, is no loop
        if "while" in line and _WHILE.search(_QUOTED.sub("", line)):
            iterations = _ITERATIONS.search(line)
            if " while(" not in line or iterations is None or int(iterations[1]) > MOST_ITERATIONS:
                return False
    return True
