"""Values of varying lengths inside a program of fixed shapes: where their elements lie, and where the padding is.

A ``Padded`` value has an array of the value's largest size, and for each dimension the *factors* of its size in the
order in which they lie in the array. A length of at most 64 occupies the first of 64 places. Three such sequences,
flattened to one dimension, have the factors ``(3, L)``: the array has 192 places, with padding after each sequence.
So flattening moves nothing; a rule that needs the elements side by side gathers them (``plain``). The padding has
arbitrary values: rules that sum or compare along a dimension replace it first (``masked``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.jax_bridge import symbolic_sizes
from xla_core.jax_bridge.symbolic_sizes import is_symbolic
from xla_core.jax_bridge.traced_values import Size, TracedValue

Factors: TypeAlias = tuple[Size, ...]


class NotCoveredError(NotImplementedError):
    """A varying length cannot pass through an operation; the message says which and why."""


MSG_UNBOUNDED = "a size of {size} has no bound"
MSG_LARGE = "{size} elements may be too many to be counted in 32 bits"


@dataclasses.dataclass(frozen=True, slots=True)
class Dim:
    """One dimension: the factors of its size, in the order in which they lie in the array.

    A ``uniform`` dimension has one place in the array, whose value is that of all elements.
    """

    factors: Factors
    uniform: bool = False

    @property
    def size(self) -> Size:
        """The number of elements along it."""
        size: Size = 1
        for factor in self.factors:
            size = size * factor
        return size

    @property
    def varies(self) -> bool:
        """Whether its size varies."""
        return any(map(is_symbolic, self.factors))


def dim_of(size: Size) -> Dim:
    """A dimension whose elements lie side by side, followed by the padding."""
    return Dim(_merged((size,)))


def dim_of_factors(factors: Sequence[object]) -> Dim:
    """A dimension with these factors; adjacent constant factors are multiplied."""
    return Dim(_merged(factors))


def _merged(factors: Sequence[Size]) -> Factors:
    merged: list[Size] = []
    for factor in factors:
        if is_symbolic(factor):
            merged.append(factor)
        elif merged and not is_symbolic(merged[-1]):
            merged[-1] *= int(factor)
        else:
            merged.append(int(factor))
    kept = [f for f in merged if is_symbolic(f) or f != 1]
    return tuple(kept) if len(kept) == len(merged) else _merged(kept)


@dataclasses.dataclass(frozen=True, slots=True)
class Padded:
    """A value: an array with padding, and its dimensions."""

    array: TracedValue
    dims: tuple[Dim, ...]

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The number of elements along each dimension."""
        return tuple(dim.size for dim in self.dims)

    @property
    def varies(self) -> bool:
        """Whether any dimension does."""
        return any(dim.varies for dim in self.dims)

    def with_array(self, array: object) -> Padded:
        """Another array with the same dimensions."""
        return Padded(array, self.dims)


Value: TypeAlias = TracedValue | Padded
"""A value that may vary: ``Padded`` if it does, else a plain array."""


def as_padded(value: Value) -> Padded:
    """``value``; an array of fixed shape becomes a ``Padded`` value without padding."""
    if isinstance(value, Padded):
        return value
    return Padded(value, tuple(map(dim_of, np.shape(value))))


def unwrapped(value: Padded) -> Value:
    """The array itself if nothing varies, else the value."""
    return value if value.varies else value.array


class Frame:
    """The lengths of one program: their bounds, and their values at run time.

    ``lengths`` are jax integers by name. The methods take and return ``Padded`` values.
    """

    def __init__(self, lengths: Mapping[str, Size]) -> None:
        self.lengths = dict(lengths)
        self._bounds: dict[Size, int] = {}
        self._numbers: dict[Size, Size] = {}

    def inside(self) -> Frame:
        """A frame of the same lengths for the body of an inner function: its traced values must not leave it."""
        return Frame(self.lengths)

    # -- sizes ---------------------------------------------------------------------------------

    def bound(self, size: Size) -> int:
        """The largest value of a size."""
        if not is_symbolic(size):
            return int(size)
        known = self._bounds.get(size)
        if known is None:
            high = symbolic_sizes.bounds(size)[1]
            if not math.isfinite(high):
                raise NotCoveredError(MSG_UNBOUNDED.format(size=size))
            known = self._bounds[size] = int(high)
        return known

    def places(self, dim: Dim) -> int:
        """The number of places of a dimension in the array."""
        return 1 if dim.uniform else math.prod(map(self.bound, dim.factors))

    def shape(self, dims: Sequence[Dim]) -> tuple[int, ...]:
        """The shape of an array with these dimensions."""
        return tuple(map(self.places, dims))

    def number(self, size: Size) -> Size:
        """The value of a size in this run: a number, or a 32-bit jax integer."""
        if not is_symbolic(size):
            return int(size)
        if self.bound(size) >= 2**31:
            raise NotCoveredError(MSG_LARGE.format(size=size))
        known = self._numbers.get(size)
        if known is None:
            known = jnp.asarray(symbolic_sizes.evaluate(size, self.lengths)).astype(np.int32)
            self._numbers[size] = known
        return known

    # -- places --------------------------------------------------------------------------------

    def valid(self, dim: Dim) -> Array | None:
        """For each place along a dimension, whether it holds an element; None if all do."""
        if dim.uniform or not dim.varies:
            return None
        shape = tuple(map(self.bound, dim.factors))
        mask = None
        for axis, factor in enumerate(dim.factors):
            if is_symbolic(factor):
                within = lax.broadcasted_iota(np.int32, shape, axis) < self.number(factor)
                mask = within if mask is None else mask & within
        return mask.reshape(-1) if mask is not None else None

    def elements(self, dim: Dim) -> object:
        """For each place along a dimension, the number of its element; arbitrary in the padding."""
        shape = tuple(map(self.bound, dim.factors))
        number = jnp.zeros(shape, np.int32)
        for axis, factor in enumerate(dim.factors):
            number = number * self.number(factor) + lax.broadcasted_iota(np.int32, shape, axis)
        return number.reshape(-1)

    def places_of(self, numbers: Array, dim: Dim) -> object:
        """The places of the elements with these ``numbers`` along a dimension."""
        place, stride = jnp.zeros_like(numbers), 1
        for position in range(len(dim.factors) - 1, -1, -1):
            factor = dim.factors[position]
            size = self.number(factor)
            within = numbers % size if position else numbers
            place = place + within * stride
            numbers = numbers // size
            stride *= self.bound(factor)
        return place

    # -- changing where elements lie -----------------------------------------------------------

    def laid_out(self, value: Padded, axis: int, wanted: Dim) -> Padded:
        """The same value in the layout ``wanted`` along ``axis``; both layouts have the same size."""
        dim = value.dims[axis]
        if dim == wanted:
            return value
        if dim.uniform:
            if wanted.uniform:
                return value
            array = _repeated(value.array, axis, self.places(wanted))
        elif dim.factors == wanted.factors:
            return value
        else:
            places = self.places_of(self.elements(wanted), dim)
            array = jnp.take(value.array, places, axis=axis, mode="clip")
        return Padded(array, _replaced(value.dims, axis, wanted))

    def plain(self, value: Padded, axis: int) -> Padded:
        """The same value with its elements along ``axis`` side by side, followed by the padding."""
        dim = value.dims[axis]
        if not dim.uniform and len(dim.factors) < 2:
            return value
        return self.laid_out(value, axis, dim_of(dim.size))

    def spread(self, value: Padded, axis: int) -> Padded:
        """The same value with a place for each element along ``axis``, also if it was uniform."""
        return self.plain(value, axis) if value.dims[axis].uniform else value

    def masked(self, value: Padded, axes: Sequence[int], fill: TracedValue) -> Padded:
        """The same value with ``fill`` in the padding along ``axes``, none of which stays uniform."""
        for axis in axes:
            value = self.spread(value, axis)
            valid = self.valid(value.dims[axis])
            if valid is not None:
                shape = [1] * len(value.dims)
                shape[axis] = -1
                mask = jnp.broadcast_to(valid.reshape(shape), value.array.shape)
                filling = jnp.full(value.array.shape, fill, value.array.dtype)
                value = value.with_array(lax.select(mask, value.array, filling))
        return value

    def grown(self, value: Padded, axis: int, places: int) -> TracedValue:
        """The array with at least this many places along ``axis``."""
        missing = places - value.array.shape[axis]
        if missing <= 0:
            return value.array
        widths = [(0, 0, 0)] * value.array.ndim
        widths[axis] = (0, missing, 0)
        return lax.pad(value.array, np.zeros((), value.array.dtype), widths)

    def cut(self, array: TracedValue, axis: int, places: int) -> TracedValue:
        """The array's first places along ``axis``; it is extended if it has fewer."""
        grown = self.grown(as_padded(array), axis, places)
        if grown.shape[axis] == places:
            return grown
        return lax.slice_in_dim(grown, 0, places, axis=axis)

    def together(self, values: Sequence[Padded], dims: Sequence[Dim]) -> list[Padded]:
        """Values of one rank in the layout of ``dims``, except along dimensions of size 1."""
        laid: list[Padded] = []
        for value in values:
            for axis, wanted in enumerate(dims):
                dim = value.dims[axis]
                if dim.factors and not dim.uniform:
                    value = self.laid_out(value, axis, wanted)
            laid.append(value)
        return laid


def common_dims(values: Sequence[Padded]) -> tuple[Dim, ...]:
    """The dimensions of the result of an elementwise operation on values of one rank.

    If operands have different layouts along a dimension, the one with the most factors is taken, so that flattened
    sequences stay where they are.
    """
    dims: list[Dim] = []
    for column in zip(*(value.dims for value in values), strict=True):
        sized = [dim for dim in column if dim.factors]
        placed = [dim for dim in sized if not dim.uniform]
        best = max(placed, key=lambda dim: len(dim.factors), default=None)
        dims.append(best or (sized[0] if sized else Dim(())))
    return tuple(dims)


def _repeated(array: TracedValue, axis: int, places: int) -> object:
    shape = list(array.shape)
    shape[axis] = places
    return jnp.broadcast_to(array, shape)


def _replaced(dims: tuple[Dim, ...], axis: int, dim: Dim) -> tuple[Dim, ...]:
    return (*dims[:axis], dim, *dims[axis + 1 :])
