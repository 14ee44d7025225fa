"""jax's symbolic sizes: what they are between, what they are for given lengths, and which were compared.

jax calls two sizes different where it cannot know: ``L == 7`` is False, though ``L`` may be 7. Code that decides by
such a comparison is right for all lengths but those that make it true; ``watching_comparisons`` says which.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

# jax 0.10.2: the type of symbolic sizes, whose bounds and evaluation have no public names
from jax._src.export import shape_poly as _shape_poly
from jax.export import SymbolicScope, is_symbolic_dim, symbolic_shape

# jax's own code takes an equality that is not known for False on purpose, and is right either way: it chooses
# shorter programs where sizes are known to be equal.
_TRUSTED: Final = ("jax._src.", "jax.core", "jax.lax", "jax.export")

_watch = threading.local()
_plain_eq: Final = _shape_poly._DimExpr.__eq__
_plain_geq: Final = _shape_poly._geq_decision
_patched = threading.Lock()


def symbols(names: Sequence[str], constraints: Sequence[str]) -> tuple[Any, ...]:
    """A symbolic size for each name, between which the ``constraints`` hold (``"L <= 64"``)."""
    if not names:
        return ()
    return tuple(symbolic_shape(",".join(names), scope=SymbolicScope(constraints)))


def parsed(text: str) -> Any:
    """The symbolic size that is written as ``text``, to be evaluated. Raises ValueError where it is none."""
    return symbolic_shape(text, scope=SymbolicScope())[0]


def is_symbolic(size: Any) -> bool:
    """Whether a size is no plain number."""
    return bool(is_symbolic_dim(size))


def bounds(size: Any) -> tuple[float, float]:
    """Numbers that a size is never below and never above; infinite where nothing is known."""
    if not is_symbolic(size):
        return float(size), float(size)
    # jax 0.10.2
    low, high = _shape_poly._bounds_decision(size, _shape_poly.BoundsPrecision.BEST)
    return float(low), float(high)


def evaluate(size: Any, lengths: Mapping[str, Any]) -> Any:
    """The size for these lengths, by name: numbers, or jax integers."""
    # jax 0.10.2
    return size._evaluate(dict(lengths)) if is_symbolic(size) else size


def _watched_eq(left: Any, right: Any) -> bool:
    equal = _plain_eq(left, right)
    if not equal:
        _look(left, right, sys._getframe(1))
    return equal


def _watched_ne(left: Any, right: Any) -> bool:
    equal = _plain_eq(left, right)
    if not equal:
        _look(left, right, sys._getframe(1))
    return not equal


def _watched_geq(left: Any, right: Any, text: Any) -> Any:
    try:
        return _plain_geq(left, right, text)
    except _shape_poly.InconclusiveDimensionOperation as error:
        error.undecided = left - right  # type: ignore[attr-defined]
        raise


def undecided(error: BaseException | None) -> Any:
    """The difference of two sizes of which nobody knew whether it is below zero; None where ``error`` is another.

    It is known for what is raised within ``watching_comparisons``.
    """
    while error is not None:
        difference = getattr(error, "undecided", None)
        if difference is not None:
            return difference
        error = error.__cause__ or error.__context__
    return None


def names_in(size: Any) -> set[str]:
    """The names of the symbols that a size is made of."""
    # jax 0.10.2
    return set(size._get_vars()) if is_symbolic(size) else set()


def _look(left: Any, right: Any, caller: types.FrameType) -> None:
    """Note a comparison that came out unequal, if this thread's comparisons are watched and it is not jax's own."""
    noted = getattr(_watch, "found", None)
    if noted is None or getattr(_watch, "inside", False):
        return
    name = caller.f_globals.get("__name__", "")
    if not name.startswith(_TRUSTED) or name.startswith("jax._src.numpy"):
        _watch.inside = True
        try:
            _note(left, right, noted)
        finally:
            _watch.inside = False


def _note(left: Any, right: Any, noted: dict[Any, None]) -> None:
    if not is_symbolic(right) and not isinstance(right, int):
        return
    difference = left - right
    if is_symbolic(difference):
        low, high = bounds(difference)
        if low <= 0 <= high:
            noted[difference] = None


@contextlib.contextmanager
def watching_comparisons() -> Iterator[dict[Any, None]]:
    """Collect the differences of sizes that this thread's code took to be other than zero without knowing.

    What was decided inside holds for all lengths for which none of the differences is zero.
    """
    noted: dict[Any, None] = {}
    with _patched:
        # jax 0.10.2; the comparison stays as it is, and goes on being watched in threads that ask for it only
        _shape_poly._DimExpr.__eq__ = _watched_eq
        _shape_poly._DimExpr.__ne__ = _watched_ne
        _shape_poly._geq_decision = _watched_geq
    _watch.found = noted
    try:
        yield noted
    finally:
        _watch.found = None


def threefry(key: Any, numbers: Any) -> tuple[Any, Any]:
    """The two words of random bits of each element; ``numbers`` are the elements' 64-bit numbers.

    ``key`` are the two words of a key. An array of random bits of any shape has those of its elements' numbers.
    """
    from jax.extend.random import threefry2x32_p  # takes 0.1 s, for what few programs need

    high = (numbers >> np.uint64(32)).astype(np.uint32)
    low = numbers.astype(np.uint32)
    first, second = threefry2x32_p.bind(key[0], key[1], high, low)
    return first, second


def bind_again(equation: Any, operands: Sequence[Any]) -> Any:
    """What an equation of a jaxpr gives for other operands of the same shapes."""
    # jax 0.10.2: the parameters, with inner functions among them; before, these apart
    bind_params = equation.primitive.get_bind_params(equation.params)
    inner, params = bind_params if isinstance(bind_params, tuple) else ((), bind_params)
    return equation.primitive.bind(*inner, *operands, **params)
