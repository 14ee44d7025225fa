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

_operations: dict[str, Callable[..., Any]] = {}


def _named(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
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

    def evaluate(*values: Any) -> Any:
        rest = list(values[count:])
        named = {k: [rest.pop(0) for _ in range(size)] for k, size in sizes.items()}
        return function(*values[:count], **named, **fixed)

    extra = [op for ops in lists.values() for op in ops]
    return XlaOp(builder, name, [*operands, *extra], evaluate)


# -- elementwise ----------------------------------------------------------------------------------


def _shift_right(x: Any, by: Any) -> Any:
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


def _binary(name: str, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def run(left: Any, right: Any) -> Any:
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
def _select(predicate: Any, true: Any, false: Any) -> Any:
    return lax.select(predicate, true, false)


@_named("Clamp")
def _clamp(x: Any, low: Any, high: Any) -> Any:
    return lax.clamp(low, x, high)


@_named("Convert")
def _convert(x: Any, to_type: str) -> Any:
    return lax.convert_element_type(x, numpy_type(to_type))


@_named("BitcastConvert")
def _bitcast(x: Any, to_type: str) -> Any:
    return lax.bitcast_convert_type(x, numpy_type(to_type))


# -- leaves and tuples ----------------------------------------------------------------------------


@_named("Constant")
def _constant(value: torch.Tensor) -> Any:
    return jnp.asarray(to_numpy(value))


@_named("Iota")
def _iota(shape: Any, iota_dimension: int) -> Any:
    struct = struct_of(shape)
    return lax.broadcasted_iota(struct.dtype, struct.shape, iota_dimension)


@_named("Tuple")
def _tuple(*values: Any) -> Any:
    return tuple(values)


@_named("GetTupleElement")
def _element(value: Any, index: int) -> Any:
    return value[index]


# -- shapes ---------------------------------------------------------------------------------------


@_named("Reshape")
def _reshape(
    x: Any, sizes: Sequence[int], dimensions: Any = None, inferred_dimension: Any = None
) -> Any:
    del inferred_dimension  # of dynamic shapes
    return _reshaped(x if dimensions is None else lax.transpose(x, tuple(dimensions)), sizes)


def _reshaped(x: Any, sizes: Sequence[int]) -> Any:
    if math.prod(sizes) != x.size:
        raise ValueError(MSG_SIZES.format(size=x.size, sizes=tuple(sizes)))
    return lax.reshape(x, tuple(sizes))


@_named("DynamicReshape")
def _dynamic_reshape(x: Any, sizes: Sequence[int]) -> Any:
    return _reshaped(x, sizes)


@_named("Broadcast")
def _broadcast(x: Any, sizes: Sequence[int]) -> Any:
    return lax.broadcast(x, tuple(sizes))


@_named("BroadcastInDim")
def _broadcast_in_dim(x: Any, sizes: Sequence[int], dimensions: Sequence[int]) -> Any:
    return lax.broadcast_in_dim(x, tuple(sizes), tuple(dimensions))


@_named("Transpose")
def _transpose(x: Any, permutation: Sequence[int]) -> Any:
    return lax.transpose(x, tuple(permutation))


@_named("Rev")
def _reverse(x: Any, dimensions: Sequence[int]) -> Any:
    return lax.rev(x, tuple(dimensions))


@_named("Slice")
def _slice(x: Any, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    return lax.slice(x, tuple(start_indices), tuple(limit_indices), tuple(strides))


@_named("SliceInDim")
def _slice_in_dim(x: Any, start_index: int, limit_index: int, dimno: int, stride: int) -> Any:
    return lax.slice_in_dim(x, start_index, limit_index, stride, dimno)


@_named("DynamicSlice")
def _dynamic_slice(x: Any, start_indices: Sequence[Any], slice_sizes: Sequence[int]) -> Any:
    return lax.dynamic_slice(x, start_indices, tuple(slice_sizes))


@_named("DynamicUpdateSlice")
def _dynamic_update_slice(x: Any, update: Any, start_indices: Sequence[Any]) -> Any:
    return lax.dynamic_update_slice(x, update, start_indices)


@_named("Pad")
def _pad(x: Any, value: Any, config: Sequence[Sequence[int]]) -> Any:
    return lax.pad(x, value, [tuple(c) for c in config])


@_named("ConcatInDim")
def _concatenate(*values: Any, dimension: int) -> Any:
    return lax.concatenate(values, dimension)


@_named("GetDimensionSize")
def _dimension_size(x: Any, dimension: int) -> Any:
    return jnp.int32(x.shape[dimension])


@_named("SetDimensionSize")
def _set_dimension_size(*_values: Any, dimension: int) -> Any:
    raise NotImplementedError(MSG_DYNAMIC)


def _indices(indices: Any, index_vector_dim: int) -> Any:
    """Indices whose vectors are along the last dimension."""
    if index_vector_dim == indices.ndim:
        return indices[..., None]
    return jnp.moveaxis(indices, index_vector_dim, -1)


@_named("Gather")
def _gather(
    x: Any,
    start_indices: Any,
    offset_dims: Sequence[int],
    collapsed_slice_dims: Sequence[int],
    start_index_map: Sequence[int],
    index_vector_dim: int,
    slice_sizes: Sequence[int] = (),
    indices_are_sorted: bool = False,
) -> Any:
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
    x: Any,
    scatter_indices: Any,
    updates: Any,
    computation: XlaComputation,
    update_window_dims: Sequence[int],
    inserted_window_dims: Sequence[int],
    scatter_dims_to_operand_dims: Sequence[int],
    index_vector_dim: int,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
) -> Any:
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
def _dot(left: Any, right: Any) -> Any:
    return lax.dot(left, right)


@_named("TriangularSolve")
def _triangular_solve(
    a: Any,
    b: Any,
    left_side: bool = True,
    lower: bool = True,
    unit_diagonal: bool = False,
    transpose_a: Any = False,
) -> Any:
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


def _convolve(x: Any, kernel: Any, window_strides: Any, padding: Any, **options: Any) -> Any:
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
def _conv(x: Any, kernel: Any, window_strides: Any, padding: Any = "valid", **options: Any) -> Any:
    return _convolve(x, kernel, window_strides, padding, **options)


@_named("ConvGeneralDilated")
def _conv_dilated(
    x: Any,
    kernel: Any,
    window_strides: Any,
    padding: Any,
    lhs_dilation: Any,
    rhs_dilation: Any,
    **options: Any,
) -> Any:
    dilation = {"lhs_dilation": tuple(lhs_dilation), "rhs_dilation": tuple(rhs_dilation)}
    return _convolve(x, kernel, window_strides, padding, **dilation, **options)


# -- windows and reductions -----------------------------------------------------------------------


@_named("Reduce")
def _reduce(x: Any, init: Any, computation: XlaComputation, dimensions: Sequence[int]) -> Any:
    return lax.reduce(x, init, computation, tuple(dimensions))


@_named("ReduceAll")
def _reduce_all(x: Any, init: Any, computation: XlaComputation) -> Any:
    return lax.reduce(x, init, computation, tuple(range(x.ndim)))


@_named("ReduceWindow")
def _reduce_window(
    x: Any,
    init: Any,
    computation: XlaComputation,
    window_dimensions: Any,
    window_strides: Any,
    padding: str = "valid",
) -> Any:
    return lax.reduce_window(
        x, init, computation, tuple(window_dimensions), tuple(window_strides), padding.upper()
    )


@_named("MaxPool")
def _max_pool(
    x: Any,
    kernel_size: Any,
    stride: Any,
    batch_dimension: int,
    feature_dimension: int,
    spatial_dimensions: Any,
    padding: str = "valid",
) -> Any:
    del batch_dimension, feature_dimension, spatial_dimensions  # the window has all dimensions
    floating = jnp.issubdtype(x.dtype, jnp.inexact)
    lowest = np.array(-np.inf if floating else jnp.iinfo(x.dtype).min, x.dtype)
    return lax.reduce_window(x, lowest, lax.max, tuple(kernel_size), tuple(stride), padding.upper())


@_named("SelectAndScatter")
@_named("SelectAndScatterWithGeneralPadding")
def _select_and_scatter(
    x: Any,
    source: Any,
    init: Any,
    window_dimensions: Any,
    window_strides: Any,
    select_computation: XlaComputation,
    scatter_computation: XlaComputation,
    padding: Any = "valid",
) -> Any:
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
    *values: Any, comparator: XlaComputation, dimension: int = -1, is_stable: bool = False
) -> Any:
    sorted_values = hlo_primitives.sort(values, comparator, dimension % values[0].ndim, is_stable)
    return sorted_values[0] if len(sorted_values) == 1 else tuple(sorted_values)


@_named("Map")
def _map(
    *values: Any,
    computation: XlaComputation,
    dimensions: Sequence[int],
    static_operands: Sequence[Any] = (),
) -> Any:
    del dimensions  # HLO has all of them, always
    mapped: Callable[..., Any] = lambda *scalars: computation(*scalars, *static_operands)  # noqa: E731
    for _ in range(values[0].ndim):
        mapped = jax.vmap(mapped)
    return mapped(*values)


# -- control flow ---------------------------------------------------------------------------------


@_named("Call")
def _call(*values: Any, computation: XlaComputation) -> Any:
    return computation(*values)


@_named("Conditional")
def _conditional(
    predicate: Any,
    true: Any,
    false: Any,
    true_computation: XlaComputation,
    false_computation: XlaComputation,
) -> Any:
    return lax.cond(
        predicate.astype(np.bool_),
        lambda: true_computation(true),
        lambda: false_computation(false),
    )


@_named("While")
def _while(
    state: Any, condition_computation: XlaComputation, body_computation: XlaComputation
) -> Any:
    return lax.while_loop(condition_computation, body_computation, state)
