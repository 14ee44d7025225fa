"""The functions of a builder's operations under jax, by torch_xla's names of the operations.

Their meaning is HLO's (https://openxla.org/xla/operation_semantics).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from xla_core.builder import hlo_windows as hlo_windows  # for the operations that it names
from xla_core.builder.hlo import (
    MSG_DYNAMIC,
    XlaBuilder,
    XlaComputation,
    XlaOp,
    numpy_type,
    struct_of,
    text_of,
)
from xla_core.builder.hlo_registry import named, operations
from xla_core.jax_bridge import hlo_primitives
from xla_core.torch_bridge.dtypes import to_numpy

MSG_UNKNOWN: Final = "Unknown XLA op name: {name}"
MSG_TYPES: Final = "Binary op {name} with different element types: {left} and {right}."
MSG_RANKS: Final = (
    "Shapes must be equal rank, but are {left} and {right}; broadcast_in_dim says how to broadcast"
)
MSG_SIZES: Final = "{size} elements cannot have the shape {sizes}"
MSG_SLICES: Final = "a gather needs slice_sizes, one size per dimension of its operand"


def create(
    builder: XlaBuilder, name: str, operands: Sequence[XlaOp], arguments: Mapping[str, object]
) -> XlaOp:
    """The operation ``name`` on ``operands``, with HLO's attributes ``arguments``.

    Operations among the attributes (start indices) become operands. Raises RuntimeError for an unknown name, and
    for operands that do not fit or belong to another builder.
    """
    function = operations.get(name)
    if function is None:
        raise RuntimeError(MSG_UNKNOWN.format(name=name))
    count = len(operands)
    own = {k: v for k, v in arguments.items() if k != "builder" and v is not None}
    lists = {
        k: v
        for k, v in own.items()
        if isinstance(v, (list, tuple)) and v and isinstance(v[0], XlaOp)
    }
    fixed = {k: v for k, v in own.items() if k not in lists}
    sizes = {k: len(v) for k, v in lists.items()}

    def evaluate(*values: jax.Array) -> jax.Array:
        rest = list(values[count:])
        named = {k: [rest.pop(0) for _ in range(size)] for k, size in sizes.items()}
        return function(*values[:count], **named, **fixed)

    extra = [op for ops in lists.values() for op in ops]
    return XlaOp(builder, name, [*operands, *extra], evaluate)


# -- elementwise ----------------------------------------------------------------------------------


def _shift_right(x: jax.Array, by: jax.Array) -> jax.Array:
    unsigned = jnp.issubdtype(x.dtype, jnp.unsignedinteger)
    return (lax.shift_right_logical if unsigned else lax.shift_right_arithmetic)(x, by)


_UNARY: Final = {
    "Neg": lax.neg, "Not": lax.bitwise_not, "Acos": lax.acos, "Asin": lax.asin, "Atan": lax.atan,
    "Ceil": lax.ceil, "Cos": lax.cos, "Cosh": lax.cosh, "Erf": lax.erf, "Erfc": lax.erfc,
    "ErfInv": lax.erf_inv, "Exp": lax.exp, "Expm1": lax.expm1, "Floor": lax.floor, "Log": lax.log,
    "Log1p": lax.log1p, "Sqrt": lax.sqrt, "Rsqrt": lax.rsqrt, "Clz": lax.clz, "Sin": lax.sin,
    "Sinh": lax.sinh, "Tan": lax.tan, "Tanh": lax.tanh, "Real": jnp.real, "Imag": jnp.imag,
    "Conj": jnp.conj,
}  # fmt: skip
_BINARY: Final = {
    "Add": lax.add, "Sub": lax.sub, "Mul": lax.mul, "Div": lax.div, "Pow": lax.pow, "Rem": lax.rem,
    "And": lax.bitwise_and, "Or": lax.bitwise_or, "Xor": lax.bitwise_xor, "Eq": lax.eq,
    "Ne": lax.ne, "Le": lax.le, "Lt": lax.lt, "Ge": lax.ge, "Gt": lax.gt, "Atan2": lax.atan2,
    "Max": lax.max, "Min": lax.min, "ShiftLeft": lax.shift_left, "ShiftRight": _shift_right,
}  # fmt: skip


def _binary(
    name: str, function: Callable[[jax.Array, jax.Array], jax.Array]
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def run(left: jax.Array, right: jax.Array) -> jax.Array:
        if left.dtype != right.dtype:
            text = MSG_TYPES.format(name=name.lower(), left=text_of(left), right=text_of(right))
            raise TypeError(text)
        if left.ndim and right.ndim and left.ndim != right.ndim:
            raise TypeError(MSG_RANKS.format(left=text_of(left), right=text_of(right)))
        # scalars and dimensions of size 1 are broadcast
        return function(*jnp.broadcast_arrays(left, right))

    return run


operations.update(_UNARY)
operations.update({name: _binary(name, function) for name, function in _BINARY.items()})


@named("Select")
def _select(predicate: jax.Array, true: jax.Array, false: jax.Array) -> jax.Array:
    return lax.select(predicate, true, false)


@named("Clamp")
def _clamp(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    return lax.clamp(low, x, high)


@named("Convert")
def _convert(x: jax.Array, to_type: str) -> jax.Array:
    return lax.convert_element_type(x, numpy_type(to_type))


@named("BitcastConvert")
def _bitcast(x: jax.Array, to_type: str) -> jax.Array:
    return lax.bitcast_convert_type(x, numpy_type(to_type))


# -- leaves and tuples ----------------------------------------------------------------------------


@named("Constant")
def _constant(value: torch.Tensor) -> jax.Array:
    return jnp.asarray(to_numpy(value))


@named("Iota")
def _iota(shape: object, iota_dimension: int) -> jax.Array:
    struct = struct_of(shape)
    return lax.broadcasted_iota(struct.dtype, struct.shape, iota_dimension)


@named("Tuple")
def _tuple(*values: jax.Array) -> jax.Array:
    return tuple(values)


@named("GetTupleElement")
def _element(value: jax.Array, index: int) -> jax.Array:
    return value[index]


# -- shapes ---------------------------------------------------------------------------------------


@named("Reshape")
def _reshape(
    x: jax.Array,
    sizes: Sequence[int],
    dimensions: Sequence[int] | None = None,
    inferred_dimension: object = None,
) -> jax.Array:
    del inferred_dimension  # used for dynamic shapes only
    return _reshaped(x if dimensions is None else lax.transpose(x, tuple(dimensions)), sizes)


def _reshaped(x: jax.Array, sizes: Sequence[int]) -> jax.Array:
    if math.prod(sizes) != x.size:
        raise ValueError(MSG_SIZES.format(size=x.size, sizes=tuple(sizes)))
    return lax.reshape(x, tuple(sizes))


@named("DynamicReshape")
def _dynamic_reshape(x: jax.Array, sizes: Sequence[int]) -> jax.Array:
    return _reshaped(x, sizes)


@named("Broadcast")
def _broadcast(x: jax.Array, sizes: Sequence[int]) -> jax.Array:
    return lax.broadcast(x, tuple(sizes))


@named("BroadcastInDim")
def _broadcast_in_dim(x: jax.Array, sizes: Sequence[int], dimensions: Sequence[int]) -> jax.Array:
    return lax.broadcast_in_dim(x, tuple(sizes), tuple(dimensions))


@named("Transpose")
def _transpose(x: jax.Array, permutation: Sequence[int]) -> jax.Array:
    return lax.transpose(x, tuple(permutation))


@named("Rev")
def _reverse(x: jax.Array, dimensions: Sequence[int]) -> jax.Array:
    return lax.rev(x, tuple(dimensions))


@named("Slice")
def _slice(
    x: jax.Array, start_indices: jax.Array, limit_indices: Sequence[int], strides: Sequence[int]
) -> jax.Array:
    return lax.slice(x, tuple(start_indices), tuple(limit_indices), tuple(strides))


@named("SliceInDim")
def _slice_in_dim(
    x: jax.Array, start_index: int, limit_index: int, dimno: int, stride: int
) -> jax.Array:
    return lax.slice_in_dim(x, start_index, limit_index, stride, dimno)


@named("DynamicSlice")
def _dynamic_slice(
    x: jax.Array, start_indices: Sequence[jax.Array], slice_sizes: Sequence[int]
) -> jax.Array:
    return lax.dynamic_slice(x, start_indices, tuple(slice_sizes))


@named("DynamicUpdateSlice")
def _dynamic_update_slice(
    x: jax.Array, update: jax.Array, start_indices: Sequence[jax.Array]
) -> jax.Array:
    return lax.dynamic_update_slice(x, update, start_indices)


@named("Pad")
def _pad(x: jax.Array, value: jax.Array, config: Sequence[Sequence[int]]) -> jax.Array:
    return lax.pad(x, value, [tuple(c) for c in config])


@named("ConcatInDim")
def _concatenate(*values: jax.Array, dimension: int) -> jax.Array:
    return lax.concatenate(values, dimension)


@named("GetDimensionSize")
def _dimension_size(x: jax.Array, dimension: int) -> jax.Array:
    return jnp.int32(x.shape[dimension])


@named("SetDimensionSize")
def _set_dimension_size(*_values: object, dimension: int) -> jax.Array:
    raise NotImplementedError(MSG_DYNAMIC)


def _indices(indices: jax.Array, index_vector_dim: int) -> jax.Array:
    """The indices with their vectors moved to the last dimension."""
    if index_vector_dim == indices.ndim:
        return indices[..., None]
    return jnp.moveaxis(indices, index_vector_dim, -1)


@named("Gather")
def _gather(
    x: jax.Array,
    start_indices: jax.Array,
    offset_dims: Sequence[int],
    collapsed_slice_dims: Sequence[int],
    start_index_map: Sequence[int],
    index_vector_dim: int,
    slice_sizes: Sequence[int] = (),
    indices_are_sorted: bool = False,
) -> jax.Array:
    if not slice_sizes:
        raise ValueError(MSG_SLICES)
    numbers = lax.GatherDimensionNumbers(
        tuple(offset_dims), tuple(collapsed_slice_dims), tuple(start_index_map)
    )
    return lax.gather(
        x,
        _indices(start_indices, index_vector_dim),
        numbers,
        tuple(slice_sizes),
        indices_are_sorted=indices_are_sorted,
        mode="clip",
    )


@named("Scatter")
def _scatter(
    x: jax.Array,
    scatter_indices: jax.Array,
    updates: jax.Array,
    computation: XlaComputation,
    update_window_dims: Sequence[int],
    inserted_window_dims: Sequence[int],
    scatter_dims_to_operand_dims: Sequence[int],
    index_vector_dim: int,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
) -> jax.Array:
    numbers = lax.ScatterDimensionNumbers(
        tuple(update_window_dims), tuple(inserted_window_dims), tuple(scatter_dims_to_operand_dims)
    )
    return hlo_primitives.scatter(
        x,
        _indices(scatter_indices, index_vector_dim),
        updates,
        computation,
        numbers,
        indices_are_sorted,
        unique_indices,
    )


# -- products -------------------------------------------------------------------------------------


@named("Dot")
def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    return lax.dot(left, right)


@named("TriangularSolve")
def _triangular_solve(
    a: jax.Array,
    b: jax.Array,
    left_side: bool = True,
    lower: bool = True,
    unit_diagonal: bool = False,
    transpose_a: bool = False,
) -> jax.Array:
    kind = {0: "N", 1: "T", 2: "C"}.get(int(transpose_a), "N")
    return lax.linalg.triangular_solve(
        a,
        b,
        left_side=left_side,
        lower=lower,
        transpose_a=kind != "N",
        conjugate_a=kind == "C",
        unit_diagonal=unit_diagonal,
    )


# -- functions of elements ------------------------------------------------------------------------


@named("Sort")
def _sort(
    *values: jax.Array, comparator: XlaComputation, dimension: int = -1, is_stable: bool = False
) -> jax.Array:
    sorted_values = hlo_primitives.sort(values, comparator, dimension % values[0].ndim, is_stable)
    return sorted_values[0] if len(sorted_values) == 1 else tuple(sorted_values)


@named("Map")
def _map(
    *values: jax.Array,
    computation: XlaComputation,
    dimensions: Sequence[int],
    static_operands: Sequence[jax.Array] = (),
) -> jax.Array:
    del dimensions  # HLO requires all dimensions
    mapped: Callable[..., object] = lambda *scalars: computation(*scalars, *static_operands)  # noqa: E731
    for _ in range(values[0].ndim):
        mapped = jax.vmap(mapped)
    return mapped(*values)


# -- control flow ---------------------------------------------------------------------------------


@named("Call")
def _call(*values: jax.Array, computation: XlaComputation) -> jax.Array:
    return computation(*values)


@named("Conditional")
def _conditional(
    predicate: jax.Array,
    true: jax.Array,
    false: jax.Array,
    true_computation: XlaComputation,
    false_computation: XlaComputation,
) -> jax.Array:
    return lax.cond(
        predicate.astype(np.bool_),
        lambda: true_computation(true),
        lambda: false_computation(false),
    )


@named("While")
def _while(
    state: jax.Array, condition_computation: XlaComputation, body_computation: XlaComputation
) -> jax.Array:
    return lax.while_loop(condition_computation, body_computation, state)
