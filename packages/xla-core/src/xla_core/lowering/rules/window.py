"""What pooling rules share: window geometry, maxima with their places, sums over windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.jax_bridge.symbolic_sizes import are_all, at_least
from xla_core.jax_bridge.traced_values import TracedValue
from xla_core.lowering.rules.common import Scalar, count_as, is_float
from xla_core.lowering.rules.common import where as select

_PLACE: Final = np.dtype(np.int32)


def spread(value: int | Sequence[int] | None, rank: int, default: Sequence[int] = ()) -> list[int]:
    """One number per pooled dimension, ``default`` if PyTorch's empty list was given."""
    numbers = [value] if isinstance(value, int) else list(value or default)
    return numbers * rank if len(numbers) == 1 else numbers


def lowest(dtype: np.dtype) -> np.ndarray:
    """The value that never wins a maximum."""
    return np.asarray(-np.inf if is_float(dtype) else np.iinfo(dtype).min, dtype)


class Axis:
    """One pooled dimension: its input size and windows of ``kernel`` entries."""

    def __init__(
        self, size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
    ) -> None:
        self.size, self.kernel, self.stride = size, kernel, stride
        self.padding, self.dilation = padding, dilation
        room = size + 2 * padding - dilation * (kernel - 1) - 1
        count = -(-room // stride) + 1 if ceil_mode else room // stride + 1
        # A last window that starts in the upper padding is dropped, as in PyTorch.
        self.count = count - 1 if ceil_mode and (count - 1) * stride >= size + padding else count

    @property
    def reach(self) -> int:
        """How far the windows reach from the first padded entry."""
        return (self.count - 1) * self.stride + self.dilation * (self.kernel - 1) + 1

    def pad(self, x: Array, axis: int, fill: Scalar) -> Array:
        """``x`` padded, or cut, to exactly what the windows read."""
        config = [(0, 0, 0)] * x.ndim
        config[axis] = (self.padding, self.reach - self.size - self.padding, 0)
        return x if are_all(config[axis], 0) else lax.pad(x, np.asarray(fill, x.dtype), config)

    def tap(self, x: Array, axis: int, place: int) -> Array:
        """Entry ``place`` of every window of the padded ``x``."""
        low = place * self.dilation
        high = low + (self.count - 1) * self.stride + 1
        return lax.slice_in_dim(x, low, high, self.stride, axis)

    def starts(self) -> TracedValue:
        """The first entry of every window, negative in the padding."""
        numbers = np.arange if isinstance(self.count, int) else jnp.arange
        return numbers(self.count) * self.stride - self.padding

    def first_inside(self) -> TracedValue:
        """The place in each window of its first entry that is not padding."""
        place = -(self.starts() // self.dilation)
        return place.clip(min=0)

    def most_outside(self) -> int:
        """How many entries of the first window are padding at most."""
        return -(-self.padding // self.dilation)

    def lengths(self, include_padding: bool) -> TracedValue:
        """How many entries of each window count for an average."""
        low = self.starts()
        size = count_as(self.size, low.dtype)
        high = (low + self.kernel).clip(max=size + self.padding)
        if not include_padding:
            low, high = low.clip(min=0), high.clip(max=size)
        return high - low


def along_axis(numbers: TracedValue, rank: int, axis: int) -> TracedValue:
    """A vector shaped to broadcast along one of ``rank`` dimensions."""
    return numbers.reshape([-1 if a == axis else 1 for a in range(rank)])


def max_scan(
    taps: Sequence[Array], carried: Sequence[Sequence[Array]], first: np.ndarray
) -> tuple[Array, Array, list[Array]]:
    """Largest of ``taps``, its place, and what was carried along with it.

    The first of equal values wins and the last NaN, as in PyTorch's CPU kernel; ``first`` is the
    place reported when no tap is above the lowest value.
    """
    best = jnp.full(taps[0].shape, lowest(taps[0].dtype))
    place = jnp.broadcast_to(jnp.asarray(first, np.int32), best.shape)
    kept = [parts[0] for parts in carried]
    for number, tap in enumerate(taps):
        wins = tap > best
        if is_float(tap.dtype):
            wins = wins | (tap != tap)
        best = select(wins, tap, best)
        place = select(wins, jnp.asarray(number, np.int32), place)
        if number:
            kept = [
                select(wins, parts[number], held) for parts, held in zip(carried, kept, strict=True)
            ]
    return best, place, kept


def max_pool(x: Array, axes: Sequence[Axis]) -> tuple[Array, Array]:
    """Maxima and their flat places over the last dimensions.

    On the CPU value and place are packed in one 64-bit integer, whose maxima over windows XLA
    computes fast: 0.6 ms for 64x32x28x28 with 2x2 windows, where comparing shifted copies takes
    1.5 ms and a window reduction over pairs 4.5. Other devices only emulate 64-bit integers.
    """
    if x.dtype.itemsize > 4:
        return _max_by_axis(x, axes)
    return lax.platform_dependent(
        x, cpu=lambda v: _max_packed(v, axes), default=lambda v: _max_by_axis(v, axes)
    )


def _sortable(x: Array, place: Array) -> tuple[Array, Array]:
    """``x`` as 32-bit integers in the same order, and ``place`` so that the right tie wins.

    The first of equal values wins, and the last NaN, as in PyTorch's CPU kernel.
    """
    early = np.int32(np.iinfo(np.int32).max) - place
    if not is_float(x.dtype):
        return x.astype(np.int32), early
    bits = lax.bitcast_convert_type(x.astype(np.float32), np.int32)
    # Both zeros are one value; the negative numbers' order is reversed in their bits.
    bits = select(bits < 0, bits ^ np.int32(np.iinfo(np.int32).max), bits)
    bits = select(x == 0, 0, bits)
    nan = x != x
    return select(nan, np.iinfo(np.int32).max, bits), select(nan, place, early)


def _max_packed(x: Array, axes: Sequence[Axis]) -> tuple[Array, Array]:
    lead = x.ndim - len(axes)
    place: Scalar = np.int32(0)
    for offset, window in enumerate(axes):
        step = lax.broadcasted_iota(np.int32, x.shape, lead + offset)
        place = place * count_as(window.size, _PLACE) + step
    high, low = _sortable(x, place)
    packed = (high.astype(np.int64) << 32) | low.astype(np.int64)
    ones = (1,) * lead
    best = lax.reduce_window(
        packed,
        np.int64(np.iinfo(np.int64).min),
        lax.max,
        (*ones, *(w.kernel for w in axes)),
        (*ones, *(w.stride for w in axes)),
        [(0, 0)] * lead + [(w.padding, at_least(w.reach - w.size - w.padding, 0)) for w in axes],
        window_dilation=(*ones, *(w.dilation for w in axes)),
    )
    high, low = (best >> 32).astype(np.int32), best.astype(np.int32)
    late = np.int32(np.iinfo(np.int32).max) - low
    if not is_float(x.dtype):
        return high.astype(x.dtype), late
    bits = select(high < 0, high ^ np.int32(np.iinfo(np.int32).max), high)
    value = lax.bitcast_convert_type(bits, np.float32).astype(x.dtype)
    # The largest integer stands for NaN, and read back as a float it is one.
    return value, select(value != value, low, late)


def _max_by_axis(x: Array, axes: Sequence[Axis]) -> tuple[Array, Array]:
    """One dimension after the other: ``sum(kernel)`` instead of ``prod(kernel)`` steps."""
    rank = x.ndim
    by_axis: list[Array] = []
    for offset in range(len(axes)):
        axis, window = rank - 1 - offset, axes[-1 - offset]
        padded = window.pad(x, axis, lowest(x.dtype))
        taps = [window.tap(padded, axis, k) for k in range(window.kernel)]
        carried = [_carried(window, places, axis) for places in by_axis]
        first = window.first_inside()
        x, place, kept = max_scan(taps, carried, along_axis(first, rank, axis))
        kept = [
            _at_first(window, held, parts, place, axis)
            for held, parts in zip(kept, carried, strict=True)
        ]
        starts = along_axis(window.starts().astype(np.int32), rank, axis)
        by_axis = [place * np.int32(window.dilation) + starts, *kept]
    flat = by_axis[0]
    for window, places in zip(axes[1:], by_axis[1:], strict=True):
        flat = flat * count_as(window.size, _PLACE) + places
    return x, flat


def _carried(window: Axis, places: Array, axis: int) -> list[Array]:
    padded = window.pad(places, axis, 0)
    return [window.tap(padded, axis, k) for k in range(window.kernel)]


def _at_first(window: Axis, held: Array, parts: Sequence[Array], place: Array, axis: int) -> Array:
    # Only a window whose values are all the lowest keeps its initial place; where that place lies
    # behind padding, what is carried must come from it too.
    for number in range(1, window.most_outside() + 1):
        held = select(place == number, parts[number], held)
    return held


def max_pool_backward(grad: Array, flat: Array, like: Sequence[int], axes: Sequence[Axis]) -> Array:
    """Gradients at the places that won, zero elsewhere, without a scatter.

    Every input entry looks at the windows that may cover it: the windows are spread out by their
    stride, once for each window that overlaps it, and compared with the entry's own place.
    """
    rank, lead = len(like), len(like) - len(axes)
    own: object = None
    for offset, window in enumerate(axes):
        step = lax.broadcasted_iota(flat.dtype, tuple(like), lead + offset)
        own = step if own is None else own * count_as(window.size, flat.dtype) + step
    overlaps = [-(-(w.dilation * (w.kernel - 1) + 1) // w.stride) for w in axes]
    total: Scalar = None
    for shift in np.ndindex(*overlaps):
        places = _spread_windows(flat, axes, shift, rank, -1)
        values = _spread_windows(grad, axes, shift, rank, 0)
        part = select(places == own, values, 0)
        total = part if total is None else total + part
    return total


def _spread_windows(
    value: Array, axes: Sequence[Axis], shift: Sequence[int], rank: int, fill: int
) -> Array:
    """Each window's value from its start, moved by ``shift`` strides, to the next one's."""
    lead = rank - len(axes)
    shape, wide = list(value.shape[:lead]), list(value.shape[:lead])
    merged, config = list(value.shape[:lead]), [(0, 0, 0)] * lead
    for window, move in zip(axes, shift, strict=True):
        shape += [window.count, 1]
        wide += [window.count, window.stride]
        length = window.count * window.stride
        merged.append(length)
        low = move * window.stride - window.padding
        config.append((low, window.size - length - low, 0))
    spread_out = jnp.broadcast_to(value.reshape(shape), wide).reshape(merged)
    if all(are_all(edge, 0) for edge in config):
        return spread_out
    return lax.pad(spread_out, np.asarray(fill, value.dtype), config)


def window_sum(x: Array, axes: Sequence[Axis]) -> Array:
    """Sums over windows of the last dimensions, one dimension after the other."""
    for offset, window in enumerate(axes):
        axis = x.ndim - len(axes) + offset
        padded = window.pad(x, axis, 0)
        if window.count == 1:
            x = jnp.sum(padded, axis, keepdims=True)
            continue
        total = window.tap(padded, axis, 0)
        for place in range(1, window.kernel):
            total = total + window.tap(padded, axis, place)
        x = total
    return x


def separable(x: Array, matrices: Sequence[np.ndarray | None]) -> Array:
    """One ``[out, in]`` matrix applied along each of the last dimensions; None leaves it alone."""
    if x.dtype == np.uint8:
        return _separable_bytes(x, matrices)
    for offset, matrix in enumerate(matrices):
        if matrix is None:
            continue
        axis = x.ndim - len(matrices) + offset
        moved = lax.dot_general(
            x,
            jnp.asarray(matrix, x.dtype),
            (((axis,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
        )
        x = jnp.moveaxis(moved, -1, axis)
    return x


def _separable_bytes(x: Array, matrices: Sequence[np.ndarray | None]) -> Array:
    """``separable`` of bytes as PyTorch has it of Pillow: the last dimension first, a byte after each.

    The weights are whole numbers of 16 bits over the largest power of two that they allow.
    """
    for offset, matrix in reversed(list(enumerate(matrices))):
        if matrix is None:
            continue
        largest = float(matrix.max(initial=0))
        fits = [p for p in range(1, 23) if int(0.5 + largest * 2**p) < 2**15]
        bits = max(fits, default=0)
        weights = np.trunc(np.copysign(0.5, matrix) + matrix * 2**bits).astype(np.int32)
        axis = x.ndim - len(matrices) + offset
        sums = lax.dot_general(x.astype(np.int32), weights, (((axis,), (1,)), ((), ())))
        rounded = (sums + np.int32(2**bits // 2)) >> np.int32(bits)
        x = jnp.moveaxis(jnp.clip(rounded, 0, 255).astype(np.uint8), -1, axis)
    return x


def transposed(matrices: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """The matrices of the gradient of ``separable``."""
    return [None if m is None else m.T for m in matrices]
