"""What the operations of a builder compute, by the names that torch_xla gives them, under jax.

Their meaning is HLO's (https://openxla.org/xla/operation_semantics).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from xla_core.builder.hlo import (
    MSG_DYNAMIC,
    XlaBuilder,
    XlaComputation,
    XlaOp,
    numpy_type,
    struct_of,
    text_of,
)
from xla_core.jax_bridge import hlo_primitives
from xla_core.torch_bridge.dtypes import to_numpy

MSG_UNKNOWN: Final = "Unknown XLA op name: {name}"
MSG_TYPES: Final = "Binary op {name} with different element types: {left} and {right}."
MSG_RANKS: Final = (
    "Shapes must be equal rank, but are {left} and {right}; broadcast_in_dim says how to broadcast"
)
MSG_SIZES: Final = "{size} elements have no shape {sizes}"
MSG_SLICES: Final = "a gather needs slice_sizes, one size per dimension of its operand"

_operations: dict[str, Callable[..., object]] = {}


def _named(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., object]) -> Callable[..., Any]:
        _operations[name] = function
        return function

    return register


def create(
    builder: XlaBuilder, name: str, operands: Sequence[XlaOp], arguments: Mapping[str, Any]
) -> XlaOp:
    """The operation ``name`` of operands, with HLO's attributes as ``arguments``.

    Operations among the attributes (start indices) become operands. Raises RuntimeError for an unknown
    name and for operands that do not fit.
    """
    function = _operations.get(name)
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


def _binary(name: str, function: Callable[[Any, Any], object]) -> Callable[[Any, Any], Any]:
    def run(left: jax.Array, right: jax.Array) -> jax.Array:
        if left.dtype != right.dtype:
            text = MSG_TYPES.format(name=name.lower(), left=text_of(left), right=text_of(right))
            raise TypeError(text)
        if left.ndim and right.ndim and left.ndim != right.ndim:
            raise TypeError(MSG_RANKS.format(left=text_of(left), right=text_of(right)))
        # a scalar goes with every shape, a dimension of size 1 with every size
        return function(*jnp.broadcast_arrays(left, right))

    return run


_operations.update(_UNARY)
_operations.update({name: _binary(name, function) for name, function in _BINARY.items()})


@_named("Select")
def _select(predicate: jax.Array, true: jax.Array, false: jax.Array) -> jax.Array:
    return lax.select(predicate, true, false)


@_named("Clamp")
def _clamp(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    return lax.clamp(low, x, high)


@_named("Convert")
def _convert(x: jax.Array, to_type: str) -> jax.Array:
    return lax.convert_element_type(x, numpy_type(to_type))


@_named("BitcastConvert")
def _bitcast(x: jax.Array, to_type: str) -> jax.Array:
    return lax.bitcast_convert_type(x, numpy_type(to_type))


# -- leaves and tuples ----------------------------------------------------------------------------


@_named("Constant")
def _constant(value: torch.Tensor) -> jax.Array:
    return jnp.asarray(to_numpy(value))


@_named("Iota")
def _iota(shape: Any, iota_dimension: int) -> jax.Array:
    struct = struct_of(shape)
    return lax.broadcasted_iota(struct.dtype, struct.shape, iota_dimension)


@_named("Tuple")
def _tuple(*values: jax.Array) -> jax.Array:
    return tuple(values)


@_named("GetTupleElement")
def _element(value: jax.Array, index: int) -> jax.Array:
    return value[index]


# -- shapes ---------------------------------------------------------------------------------------


@_named("Reshape")
def _reshape(
    x: jax.Array,
    sizes: Sequence[int],
    dimensions: Sequence[int] | None = None,
    inferred_dimension: Any = None,
) -> jax.Array:
    del inferred_dimension  # of dynamic shapes
    return _reshaped(x if dimensions is None else lax.transpose(x, tuple(dimensions)), sizes)


def _reshaped(x: jax.Array, sizes: Sequence[int]) -> jax.Array:
    if math.prod(sizes) != x.size:
        raise ValueError(MSG_SIZES.format(size=x.size, sizes=tuple(sizes)))
    return lax.reshape(x, tuple(sizes))


@_named("DynamicReshape")
def _dynamic_reshape(x: jax.Array, sizes: Sequence[int]) -> jax.Array:
    return _reshaped(x, sizes)


@_named("Broadcast")
def _broadcast(x: jax.Array, sizes: Sequence[int]) -> jax.Array:
    return lax.broadcast(x, tuple(sizes))


@_named("BroadcastInDim")
def _broadcast_in_dim(x: jax.Array, sizes: Sequence[int], dimensions: Sequence[int]) -> jax.Array:
    return lax.broadcast_in_dim(x, tuple(sizes), tuple(dimensions))


@_named("Transpose")
def _transpose(x: jax.Array, permutation: Sequence[int]) -> jax.Array:
    return lax.transpose(x, tuple(permutation))


@_named("Rev")
def _reverse(x: jax.Array, dimensions: Sequence[int]) -> jax.Array:
    return lax.rev(x, tuple(dimensions))


@_named("Slice")
def _slice(
    x: jax.Array, start_indices: jax.Array, limit_indices: Sequence[int], strides: Sequence[int]
) -> jax.Array:
    return lax.slice(x, tuple(start_indices), tuple(limit_indices), tuple(strides))


@_named("SliceInDim")
def _slice_in_dim(
    x: jax.Array, start_index: int, limit_index: int, dimno: int, stride: int
) -> jax.Array:
    return lax.slice_in_dim(x, start_index, limit_index, stride, dimno)


@_named("DynamicSlice")
def _dynamic_slice(
    x: jax.Array, start_indices: Sequence[jax.Array], slice_sizes: Sequence[int]
) -> jax.Array:
    return lax.dynamic_slice(x, start_indices, tuple(slice_sizes))


@_named("DynamicUpdateSlice")
def _dynamic_update_slice(
    x: jax.Array, update: jax.Array, start_indices: Sequence[jax.Array]
) -> jax.Array:
    return lax.dynamic_update_slice(x, update, start_indices)


@_named("Pad")
def _pad(x: jax.Array, value: jax.Array, config: Sequence[Sequence[int]]) -> jax.Array:
    return lax.pad(x, value, [tuple(c) for c in config])


@_named("ConcatInDim")
def _concatenate(*values: jax.Array, dimension: int) -> jax.Array:
    return lax.concatenate(values, dimension)


@_named("GetDimensionSize")
def _dimension_size(x: jax.Array, dimension: int) -> jax.Array:
    return jnp.int32(x.shape[dimension])


@_named("SetDimensionSize")
def _set_dimension_size(*_values: object, dimension: int) -> jax.Array:
    raise NotImplementedError(MSG_DYNAMIC)


def _indices(indices: jax.Array, index_vector_dim: int) -> jax.Array:
    """Indices whose vectors are along the last dimension."""
    if index_vector_dim == indices.ndim:
        return indices[..., None]
    return jnp.moveaxis(indices, index_vector_dim, -1)


@_named("Gather")
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


@_named("Scatter")
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


@_named("Dot")
def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    return lax.dot(left, right)


@_named("TriangularSolve")
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


_SPATIAL: Final = "DHW"


def _convolve(
    x: jax.Array,
    kernel: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    **options: Any,
) -> Any:
    names = ("input", "kernel", "output")
    specs = []
    rank = x.ndim - 2
    spatial = tuple(range(2, rank + 2))
    for name in names:
        first, second = {
            "input": ("input_batch_dimension", "input_feature_dimension"),
            "kernel": ("kernel_output_feature_dimension", "kernel_input_feature_dimension"),
            "output": ("output_batch_dimension", "output_feature_dimension"),
        }[name]
        given = options.pop(f"{name}_spatial_dimensions", spatial)
        specs.append((options.pop(first, 0), options.pop(second, 1), *given))
    options.pop("precision_config", None)
    window = padding.upper() if isinstance(padding, str) else [tuple(p) for p in padding]
    return lax.conv_general_dilated(
        x,
        kernel,
        tuple(window_strides),
        window,
        dimension_numbers=lax.ConvDimensionNumbers(*specs),
        **options,
    )


@_named("Conv")
@_named("ConvWithGeneralPadding")
@_named("ConvWithGeneralDimensions")
@_named("ConvGeneral")
def _conv(
    x: jax.Array,
    kernel: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]] = "valid",
    **options: object,
) -> jax.Array:
    return _convolve(x, kernel, window_strides, padding, **options)


@_named("ConvGeneralDilated")
def _conv_dilated(
    x: jax.Array,
    kernel: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    **options: object,
) -> jax.Array:
    dilation = {"lhs_dilation": tuple(lhs_dilation), "rhs_dilation": tuple(rhs_dilation)}
    return _convolve(x, kernel, window_strides, padding, **dilation, **options)


# -- windows and reductions -----------------------------------------------------------------------


@_named("Reduce")
def _reduce(
    x: jax.Array, init: jax.Array, computation: XlaComputation, dimensions: Sequence[int]
) -> jax.Array:
    return lax.reduce(x, init, computation, tuple(dimensions))


@_named("ReduceAll")
def _reduce_all(x: jax.Array, init: jax.Array, computation: XlaComputation) -> jax.Array:
    return lax.reduce(x, init, computation, tuple(range(x.ndim)))


@_named("ReduceWindow")
def _reduce_window(
    x: jax.Array,
    init: jax.Array,
    computation: XlaComputation,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: str = "valid",
) -> jax.Array:
    return lax.reduce_window(
        x, init, computation, tuple(window_dimensions), tuple(window_strides), padding.upper()
    )


@_named("MaxPool")
def _max_pool(
    x: jax.Array,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    batch_dimension: int,
    feature_dimension: int,
    spatial_dimensions: Sequence[int],
    padding: str = "valid",
) -> jax.Array:
    del batch_dimension, feature_dimension, spatial_dimensions  # the window has all dimensions
    floating = jnp.issubdtype(x.dtype, jnp.inexact)
    lowest = np.array(-np.inf if floating else jnp.iinfo(x.dtype).min, x.dtype)
    return lax.reduce_window(x, lowest, lax.max, tuple(kernel_size), tuple(stride), padding.upper())


@_named("SelectAndScatter")
@_named("SelectAndScatterWithGeneralPadding")
def _select_and_scatter(
    x: jax.Array,
    source: jax.Array,
    init: jax.Array,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    select_computation: XlaComputation,
    scatter_computation: XlaComputation,
    padding: str | Sequence[tuple[int, int]] = "valid",
) -> jax.Array:
    window, strides = tuple(window_dimensions), tuple(window_strides)
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(x.shape, window, strides, padding.upper())
    return hlo_primitives.select_and_scatter(
        x,
        select_computation,
        window,
        strides,
        [tuple(p) for p in padding],
        source,
        init,
        scatter_computation,
    )


@_named("Sort")
def _sort(
    *values: jax.Array, comparator: XlaComputation, dimension: int = -1, is_stable: bool = False
) -> jax.Array:
    sorted_values = hlo_primitives.sort(values, comparator, dimension % values[0].ndim, is_stable)
    return sorted_values[0] if len(sorted_values) == 1 else tuple(sorted_values)


@_named("Map")
def _map(
    *values: jax.Array,
    computation: XlaComputation,
    dimensions: Sequence[int],
    static_operands: Sequence[jax.Array] = (),
) -> jax.Array:
    del dimensions  # HLO has all of them, always
    mapped: Callable[..., object] = lambda *scalars: computation(*scalars, *static_operands)  # noqa: E731
    for _ in range(values[0].ndim):
        mapped = jax.vmap(mapped)
    return mapped(*values)


# -- control flow ---------------------------------------------------------------------------------


@_named("Call")
def _call(*values: jax.Array, computation: XlaComputation) -> jax.Array:
    return computation(*values)


@_named("Conditional")
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


@_named("While")
def _while(
    state: jax.Array, condition_computation: XlaComputation, body_computation: XlaComputation
) -> jax.Array:
    return lax.while_loop(condition_computation, body_computation, state)
