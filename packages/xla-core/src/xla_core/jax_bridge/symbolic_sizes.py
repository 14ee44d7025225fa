"""jax's symbolic sizes: what they are between, what they are for given lengths, and which were compared.

jax calls two sizes different where it cannot know: ``L == 7`` is False, though ``L`` may be 7. Code that decides by
such a comparison is right for all lengths but those that make it true; ``watching_comparisons`` says which.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import Array

# jax 0.10.2: the type of symbolic sizes, whose bounds and evaluation have no public names
from jax._src.export import shape_poly as _shape_poly
from jax.export import SymbolicScope, is_symbolic_dim, symbolic_shape

# jax's own code takes an equality that is not known for False on purpose, and is right either way: it chooses
# shorter programs where sizes are known to be equal.
_TRUSTED: Final = ("jax._src.", "jax.core", "jax.lax", "jax.export")

_watch = threading.local()
_plain_eq: Final = _shape_poly._DimExpr.__eq__
_plain_geq: Final = _shape_poly._geq_decision
_plain_divmod: Final = _shape_poly._DimExpr._divmod
_patched = threading.Lock()


def symbols(names: Sequence[str], constraints: Sequence[str]) -> tuple[object, ...]:
    """A symbolic size for each name, between which the ``constraints`` hold (``"L <= 64"``)."""
    if not names:
        return ()
    return tuple(symbolic_shape(",".join(names), scope=SymbolicScope(constraints)))


def parsed(text: str) -> object:
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


def are_all(sizes: Iterable[object], number: int) -> bool:
    """Whether all sizes are a number for every length. Where it is false, some may be for some lengths."""
    return not any(map(is_symbolic, sizes)) and all(size == number for size in sizes)


def at_least(size: Any, least: int) -> object:
    """The larger of a size and a number, as a size."""
    return size.max(least) if is_symbolic(size) else max(size, least)  # jax 0.10.2


def is_above(size: object, number: int) -> object:
    """Whether a size is above a number: an answer for all lengths, or a jax boolean where it depends on them."""
    low, high = bounds(size)
    if low > number or high <= number:
        return low > number
    return jnp.asarray(size) > number


def evaluate(size: Any, lengths: Mapping[str, Any]) -> Any:
    """The size for these lengths, by name: numbers, or jax integers."""
    # jax 0.10.2
    return size._evaluate(dict(lengths)) if is_symbolic(size) else size


def floored(size: Any, divisor: int) -> Any:
    """``size // divisor``, in one form for all sizes that are equal.

    jax takes ``(L - 1) // 2 + 1`` and ``(L + 1) // 2`` for different. Here whole multiples of the divisor are taken
    out, and what is divided twice is divided once.
    """
    if divisor == 1:
        return size
    if not is_symbolic(size):
        return size // divisor
    # jax 0.10.2, as all below: terms and their factors, the constant among them
    terms = size._sorted_terms
    if terms[0][1] < 0:
        return -floored(divisor - 1 - size, divisor)
    whole: Any = 0
    rest: list[tuple[Any, int]] = []
    constant = 0
    for term, factor in terms:
        quotient, left = divmod(factor, divisor)
        if term.is_constant:
            whole, constant = whole + quotient, left
            continue
        whole = whole + _sized(size, term, quotient)
        rest += [(term, left)] if left else []
    common = math.gcd(divisor, *(factor for _, factor in rest))
    divisor, constant = divisor // common, constant // common
    if not rest or divisor == 1:
        return whole + constant + sum(_sized(size, t, factor // common) for t, factor in rest)
    inner = rest[0][0].to_factor() if len(rest) == 1 and rest[0][1] == common else None
    if inner is not None and inner.operation == "floordiv":
        by = type(size)._to_constant(inner.operands[1])
        if by is not None:
            return whole + floored(inner.operands[0] + constant * by, divisor * by)
    dividend = constant + sum(_sized(size, t, factor // common) for t, factor in rest)
    return whole + type(size)._from_operation("floordiv", dividend, divisor, scope=size.scope)


def _sized(size: Any, term: Any, factor: int) -> Any:
    return type(size)._from_term(term, factor, size.scope) if factor else 0


def _canonical_divmod(size: Any, divisor: Any) -> tuple[object, object]:
    if getattr(_watch, "found", None) is None or is_symbolic(divisor) or divisor <= 0:
        quotient, rest = _plain_divmod(size, divisor)
        return quotient, rest
    quotient = floored(size, int(divisor))
    return quotient, size - divisor * quotient


def _watched_eq(left: object, right: object) -> bool:
    equal = _plain_eq(left, right)
    if not equal:
        _look(left, right, sys._getframe(1))
    return equal


def _watched_ne(left: object, right: object) -> bool:
    equal = _plain_eq(left, right)
    if not equal:
        _look(left, right, sys._getframe(1))
    return not equal


def _watched_geq(left: Any, right: Any, text: Any) -> object:
    try:
        return _plain_geq(left, right, text)
    except _shape_poly.InconclusiveDimensionOperation as error:
        error.undecided = left - right  # type: ignore[attr-defined]
        raise


def undecided(error: BaseException | None) -> object:
    """The difference of two sizes whose sign jax could not decide; None where ``error`` is another one.

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


def _look(left: object, right: object, caller: types.FrameType) -> None:
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

    Quotients of sizes are of the form of ``floored`` inside.
    What was decided inside holds for all lengths for which none of the differences is zero.
    """
    noted: dict[object, None] = {}
    with _patched:
        # jax 0.10.2; the comparison stays as it is, and goes on being watched in threads that ask for it only
        _shape_poly._DimExpr.__eq__ = _watched_eq
        _shape_poly._DimExpr.__ne__ = _watched_ne
        _shape_poly._geq_decision = _watched_geq
        _shape_poly._DimExpr._divmod = _canonical_divmod
    _watch.found = noted
    try:
        yield noted
    finally:
        _watch.found = None


def threefry(key: Array, numbers: Any) -> tuple[Array, Array]:
    """The two words of random bits of each element; ``numbers`` are the elements' 64-bit numbers.

    ``key`` are the two words of a key. An array of random bits of any shape has those of its elements' numbers.
    """
    from jax.extend.random import threefry2x32_p  # takes 0.1 s, for what few programs need

    high = (numbers >> np.uint64(32)).astype(np.uint32)
    low = numbers.astype(np.uint32)
    first, second = threefry2x32_p.bind(key[0], key[1], high, low)
    return first, second


def bind_again(equation: Any, operands: Sequence[Array]) -> Any:
    """What an equation of a jaxpr gives for other operands of the same shapes."""
    # jax 0.10.2: the parameters, with inner functions among them; before, these apart
    bind_params = equation.primitive.get_bind_params(equation.params)
    inner, params = bind_params if isinstance(bind_params, tuple) else ((), bind_params)
    return equation.primitive.bind(*inner, *operands, **params)
