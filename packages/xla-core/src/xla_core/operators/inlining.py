"""Which lowering rules are traced without the calls that jax makes of its own functions.

Most of ``jax.numpy`` is under ``jax.jit``, which traces each function as a program of its own for every new
shape, keeps that trace for ever, and lowers it as a function that XLA inlines again: two thirds of the time that
tracing takes. Without it the same operations are recorded where they are. But ``jax.disable_jit`` also unrolls
jax's loops, so it is only for rules that use none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

import jax

from xla_core.operators.lowering_registry import Rule, ViewRule
from xla_core.support import caches

_OURS: Final = "xla_core."
# Modules of rules that use no loop, neither one of ``jax.lax`` nor a function of jax that has one inside.
# Where a single call does, it is inside ``loops()``.
_PLAIN: Final = frozenset({
    "activations", "antialias", "arithmetic", "attention", "barrier", "common", "comparison",
    "complex_functions", "conv", "counting", "elementwise", "embedding", "factories", "floats",
    "foreach", "fractional_pooling", "grid_sampling", "grouped_matmul", "indexing", "losses", "margin_losses",
    "matmul", "norms", "optimizers", "padding", "pooling", "pooling_adaptive", "prims", "recurrent",
    "reductions", "resampling", "scans", "scatter", "shaping", "sort", "ternary", "view_copies", "views",
    "weight_norms",
})  # fmt: skip

loops = functools.partial(jax.disable_jit, False)
"""A context in which jax's loops stay loops."""


def calls_of(rule: object) -> AbstractContextManager[object]:
    """The context in which a rule is traced: without calls of jax's functions, or with them."""
    function: Callable[..., object] | None = None
    if isinstance(rule, Rule):
        function = rule.function
    elif isinstance(rule, ViewRule):
        function = rule.get
    return jax.disable_jit(_is_plain(getattr(function, "__module__", None) or ""))


@caches.memoized("modules whose rules are inlined")
def _is_plain(module: str) -> bool:
    return module.startswith(_OURS) and module.rpartition(".")[2] in _PLAIN
