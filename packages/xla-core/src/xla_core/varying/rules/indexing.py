"""Rules that pass varying lengths through gather and scatter.

An index counts elements, not places of the padded array, so an indexed dimension is laid out with its elements
contiguous and its padding at the end. An index beyond the true length is clamped or dropped as in the program for
that length, although the padded array is longer. Indices that are padding themselves write nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.contract.foreign_values import ForeignObject
from xla_core.jax_bridge.jax_private import Equation
from xla_core.jax_bridge.symbolic_sizes import is_symbolic
from xla_core.jax_bridge.traced_values import Size
from xla_core.varying.interpreter import bind, padding_rule
from xla_core.varying.padded import Dim, Frame, NotCoveredError, Padded, common_dims
from xla_core.varying.rules.shaping import same_size, window

MSG_WINDOW: Final = "reading or writing varying parts at computed places"
MSG_CLIP: Final = "writing to places that are clamped"

_DROP: Final = lax.GatherScatterMode.FILL_OR_DROP


def _as_one(frame: Frame, values: Sequence[Padded], axes: Sequence[int]) -> list[Padded]:
    """Gives the dimensions at ``axes``, which have the same size, one layout with a place for each element."""
    column = [Padded(None, (value.dims[axis],)) for value, axis in zip(values, axes, strict=True)]
    wanted = Dim(common_dims(column)[0].factors)
    return [frame.laid_out(v, axis, wanted) for v, axis in zip(values, axes, strict=True)]


def _spread(frame: Frame, value: Padded) -> Padded:
    for axis in range(len(value.dims)):
        value = frame.spread(value, axis)
    return value


def _placed(
    frame: Frame,
    indices: Array,
    operand: Padded,
    dims: Sequence[int],
    parts: Sequence[Size],
    drop: bool,
) -> Array:
    """Corrects indices into the unpadded ``operand`` so that they are right for its padded array.

    ``dims`` are the indexed dimensions and ``parts`` the sizes of the slices read or written along them. An index
    too large for the true length is clamped to the last valid start or, if ``drop``, moved beyond the padded array.
    """
    if indices.dtype.itemsize < 4 or indices.dtype == np.uint32:
        indices = indices.astype(np.int64 if indices.dtype == np.uint32 else np.int32)
    columns = []
    for position, (axis, part) in enumerate(zip(dims, parts, strict=True)):
        column = indices[..., position]
        dim = operand.dims[axis]
        if dim.varies:
            last = jnp.asarray(frame.number(dim.size) - int(part)).astype(column.dtype)
            if drop:
                column = jnp.where(column > last, column.dtype.type(frame.places(dim)), column)
            else:
                column = jnp.clip(column, 0, last)
        columns.append(column)
    return jnp.stack(columns, -1) if columns else indices


@padding_rule("gather")
def gather(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Reads slices; the result has the varying dimensions of the indices and the unindexed ones of the operand."""
    operand, indices = (_spread(frame, value) for value in values)
    params = equation.params
    numbers, sizes = params["dimension_numbers"], list(params["slice_sizes"])
    indexed = numbers.start_index_map
    for axis, other in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        operand, indices = _as_one(frame, (operand, indices), (axis, other))
    for axis in indexed:
        operand = frame.plain(operand, axis)
        if is_symbolic(sizes[axis]):
            raise NotCoveredError(MSG_WINDOW)
    whole = [
        sizes[axis]
        if axis not in indexed and axis not in numbers.operand_batching_dims
        else dim.size
        for axis, dim in enumerate(operand.dims)
    ]
    operand = window(frame, operand, (0,) * len(whole), whole, (1,) * len(whole))
    drop = params["mode"] == _DROP
    parts = [sizes[axis] for axis in indexed]
    placed = _placed(frame, indices.array, operand, indexed, parts, drop)
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(sizes)) if axis not in gone]
    for axis in kept:
        if axis not in indexed:
            sizes[axis] = frame.places(operand.dims[axis])
    # None, then a Dim each
    dims: list[ForeignObject] = [None] * len(equation.outvars[0].aval.shape)
    for at, axis in zip(numbers.offset_dims, kept, strict=True):
        fixed = axis in indexed
        dims[at] = Dim((sizes[axis],) if sizes[axis] != 1 else ()) if fixed else operand.dims[axis]
    rest = iter(indices.dims[:-1])
    dims = [next(rest) if dim is None else dim for dim in dims]
    array = bind(
        equation, operand.array, placed,
        slice_sizes=tuple(sizes), indices_are_sorted=False, unique_indices=False,
    )  # fmt: skip
    return [Padded(array, tuple(dims))]


@padding_rule("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter-min",
              "scatter_min", "scatter-max", "scatter_max", "scatter-sub", "scatter_sub")  # fmt: skip
def scatter(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Writes slices; indices that are padding are moved out of range, where a write is dropped."""
    operand, indices, updates = (_spread(frame, value) for value in values)
    params = equation.params
    numbers = params["dimension_numbers"]
    written = numbers.scatter_dims_to_operand_dims
    batching = numbers.operand_batching_dims
    gone = {*numbers.inserted_window_dims, *batching}
    kept = [axis for axis in range(len(operand.dims)) if axis not in gone]
    parts = dict.fromkeys(written, 1)
    for axis, at in zip(kept, numbers.update_window_dims, strict=True):
        size = updates.dims[at].size
        if same_size(size, operand.dims[axis].size) and axis not in written:
            operand, updates = _as_one(frame, (operand, updates), (axis, at))
        elif is_symbolic(size) or (axis not in written and operand.dims[axis].varies):
            raise NotCoveredError(MSG_WINDOW)
        else:
            parts[axis] = size
    lines = [at for at in range(len(updates.dims)) if at not in numbers.update_window_dims]
    for line, at in enumerate(lines):
        indices, updates = _as_one(frame, (indices, updates), (line, at))
    for axis, line in zip(batching, numbers.scatter_indices_batching_dims, strict=True):
        at = lines[line]
        operand, indices, updates = _as_one(frame, (operand, indices, updates), (axis, line, at))
    for axis in written:
        operand = frame.plain(operand, axis)
    if params["mode"] == lax.GatherScatterMode.CLIP:
        raise NotCoveredError(MSG_CLIP)
    sizes = [parts[axis] for axis in written]
    placed = _placed(frame, indices.array, operand, written, sizes, drop=True)
    nowhere = jnp.asarray([frame.places(operand.dims[axis]) for axis in written], placed.dtype)
    for line, dim in enumerate(indices.dims[:-1]):
        valid = frame.valid(dim)
        if valid is not None:
            if not written:
                raise NotCoveredError(MSG_WINDOW)
            shape = [1] * placed.ndim
            shape[line] = -1
            placed = jnp.where(valid.reshape(shape), placed, nowhere)
    array = bind(
        equation, operand.array, placed, updates.array,
        mode=_DROP, indices_are_sorted=False, unique_indices=False,
    )  # fmt: skip
    return [Padded(array, operand.dims)]
