"""Values with lengths that vary inside a program of fixed shapes: where their elements are, and where padding is.

A ``Padded`` value has an array as large as the value can become, and for each dimension the *factors* that its size
is a product of, as they lie in the array: one length of at most 64 is the first places of 64. A batch of 3 such
sequences flattened to one dimension has the factors ``(3, L)``: the array has 192 places, and the padding is
behind each sequence. So flattening moves nothing; what needs the elements side by side (``plain``) gathers them.
The padding has arbitrary values: rules that sum or compare along a dimension replace it first (``masked``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_core.jax_bridge import symbolic_sizes
from xla_core.jax_bridge.symbolic_sizes import is_symbolic

Factors: TypeAlias = tuple[Any, ...]


class NotCoveredError(NotImplementedError):
    """Something that a varying length cannot pass, and why."""


MSG_UNBOUNDED = "a size of {size} has no bound"
MSG_LARGE = "{size} elements may be too many to be counted in 32 bits"


@dataclasses.dataclass(frozen=True, slots=True)
class Dim:
    """One dimension: the factors of its size, in the order in which they lie in the array.

    A ``uniform`` dimension has one place in the array, which stands for all.
    """

    factors: Factors
    uniform: bool = False

    @property
    def size(self) -> Any:
        """How many elements there are along it."""
        size: Any = 1
        for factor in self.factors:
            size = size * factor
        return size

    @property
    def varies(self) -> bool:
        """Whether there may be padding along it, or only one place for all."""
        return any(map(is_symbolic, self.factors))


def dim_of(size: Any) -> Dim:
    """A dimension of elements that lie side by side, padding behind them."""
    return Dim(_merged((size,)))


def dim_of_factors(factors: Sequence[object]) -> Dim:
    """A dimension with these factors; those that do not vary are taken together."""
    return Dim(_merged(factors))


def _merged(factors: Sequence[Any]) -> Factors:
    merged: list[Any] = []
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

    array: Any
    dims: tuple[Dim, ...]

    @property
    def sizes(self) -> tuple[Any, ...]:
        """How many elements there are along each dimension."""
        return tuple(dim.size for dim in self.dims)

    @property
    def varies(self) -> bool:
        """Whether any dimension does."""
        return any(dim.varies for dim in self.dims)

    def with_array(self, array: object) -> Padded:
        """Another array with the same dimensions."""
        return Padded(array, self.dims)


def as_padded(value: Any) -> Padded:
    """A value of fixed shape as one without padding."""
    if isinstance(value, Padded):
        return value
    return Padded(value, tuple(map(dim_of, np.shape(value))))


def unwrapped(value: Padded) -> Any:
    """The array itself, where nothing varies."""
    return value if value.varies else value.array


class Frame:
    """The lengths of one program: their bounds, and their values when it runs.

    ``lengths`` are jax integers by name. The methods take and give ``Padded`` values.
    """

    def __init__(self, lengths: Mapping[str, Any]) -> None:
        self.lengths = dict(lengths)
        self._bounds: dict[Any, int] = {}
        self._numbers: dict[Any, Any] = {}

    def inside(self) -> Frame:
        """The same lengths in the body of an inner function, whose values the outer one has not."""
        return Frame(self.lengths)

    # -- sizes ---------------------------------------------------------------------------------

    def bound(self, size: Any) -> int:
        """The largest that a size can be."""
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
        """How many places a dimension has in the array."""
        return 1 if dim.uniform else math.prod(map(self.bound, dim.factors))

    def shape(self, dims: Sequence[Dim]) -> tuple[int, ...]:
        """The shape of an array with these dimensions."""
        return tuple(map(self.places, dims))

    def number(self, size: Any) -> Any:
        """What a size is in this run: a number, or a 32-bit jax integer."""
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

    def valid(self, dim: Dim) -> Any:
        """For each place along a dimension whether an element is there; None where all are."""
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
        """For each place along a dimension the number of the element there; anything in the padding."""
        shape = tuple(map(self.bound, dim.factors))
        number = jnp.zeros(shape, np.int32)
        for axis, factor in enumerate(dim.factors):
            number = number * self.number(factor) + lax.broadcasted_iota(np.int32, shape, axis)
        return number.reshape(-1)

    def places_of(self, numbers: Any, dim: Dim) -> object:
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
        """The same value with ``wanted`` factors along ``axis``; their product is the dimension's size."""
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
        """The same value with its elements along ``axis`` side by side, padding behind them."""
        dim = value.dims[axis]
        if not dim.uniform and len(dim.factors) < 2:
            return value
        return self.laid_out(value, axis, dim_of(dim.size))

    def spread(self, value: Padded, axis: int) -> Padded:
        """The same value with a place for each element along ``axis``."""
        return self.plain(value, axis) if value.dims[axis].uniform else value

    def masked(self, value: Padded, axes: Sequence[int], fill: Any) -> Padded:
        """The same value with ``fill`` in the padding along ``axes``, and with places for all there."""
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

    def grown(self, value: Padded, axis: int, places: int) -> Any:
        """The array with at least so many places along ``axis``."""
        missing = places - value.array.shape[axis]
        if missing <= 0:
            return value.array
        widths = [(0, 0, 0)] * value.array.ndim
        widths[axis] = (0, missing, 0)
        return lax.pad(value.array, np.zeros((), value.array.dtype), widths)

    def cut(self, array: Any, axis: int, places: int) -> Any:
        """The array's first places along ``axis``, grown where it has fewer."""
        grown = self.grown(as_padded(array), axis, places)
        if grown.shape[axis] == places:
            return grown
        return lax.slice_in_dim(grown, 0, places, axis=axis)

    def together(self, values: Sequence[Padded], dims: Sequence[Dim]) -> list[Padded]:
        """Values of one rank whose dimensions are as ``dims`` says, those of size 1 aside."""
        laid: list[Padded] = []
        for value in values:
            for axis, wanted in enumerate(dims):
                dim = value.dims[axis]
                if dim.factors and not dim.uniform:
                    value = self.laid_out(value, axis, wanted)
            laid.append(value)
        return laid


def common_dims(values: Sequence[Padded]) -> tuple[Dim, ...]:
    """The dimensions of what values of one rank give element by element.

    Of several ways in which the elements of one dimension lie, the one of most factors is taken: flattened
    sequences stay where they are.
    """
    dims: list[Dim] = []
    for column in zip(*(value.dims for value in values), strict=True):
        sized = [dim for dim in column if dim.factors]
        placed = [dim for dim in sized if not dim.uniform]
        best = max(placed, key=lambda dim: len(dim.factors), default=None)
        dims.append(best or (sized[0] if sized else Dim(())))
    return tuple(dims)


def _repeated(array: Any, axis: int, places: int) -> object:
    shape = list(array.shape)
    shape[axis] = places
    return jnp.broadcast_to(array, shape)


def _replaced(dims: tuple[Dim, ...], axis: int, dim: Dim) -> tuple[Dim, ...]:
    return (*dims[:axis], dim, *dims[axis + 1 :])
