"""What the rule files share: broadcasting on lax operations, dtypes of results, dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from torch._ops import OpOverload

from xla_core.jax_bridge.traced_values import TracedValue
from xla_core.operators.lowering_registry import RuleContext, aten
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.torch_bridge.dtypes import numpy_dtype

Shape = tuple[int, ...]

Scalar: TypeAlias = Array | complex
"""A number among an operator's arguments: the user's own, or an input of the program that it was lifted to."""


def find_overload(name: str) -> OpOverload | None:
    """The aten overload ``name`` (``"add.Tensor"``, ``"relu"``), or None if this torch lacks it."""
    packet_name, _, overload_name = name.partition(".")
    packet = getattr(aten, packet_name, None)
    return getattr(packet, overload_name or "default", None) if packet is not None else None


def present(*names: str) -> tuple[OpOverload, ...]:
    """The overloads among ``names`` that this version of PyTorch has."""
    overloads = (find_overload(name) for name in names)
    return tuple(overload for overload in overloads if overload is not None)


def broadcast_to(array: Array, shape: Shape) -> Array:
    """``array`` broadcast to ``shape``; nothing is emitted when it has that shape."""
    array = jnp.asarray(array)
    return array if array.shape == shape else jnp.broadcast_to(array, shape)


def where(condition: Array, on_true: TracedValue, on_false: TracedValue) -> Array:
    """``lax.select`` with broadcasting; plain numbers take the dtype of the other branch.

    Unlike ``jnp.where`` it emits no function call.
    """
    if not hasattr(on_true, "dtype"):
        on_true = jnp.asarray(on_true, dtype=jnp.asarray(on_false).dtype)
    if not hasattr(on_false, "dtype"):
        on_false = jnp.asarray(on_false, dtype=on_true.dtype)
    shape = jnp.broadcast_shapes(condition.shape, on_true.shape, on_false.shape)
    return lax.select(
        broadcast_to(condition, shape), broadcast_to(on_true, shape), broadcast_to(on_false, shape)
    )


def is_nan(array: Array) -> Array:
    """Whether each element of a floating-point or complex array is NaN."""
    return lax.ne(array, array)


def pair(operation: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """A lax operation on two arrays, with broadcasting added."""

    def broadcasting(left: Array, right: Array) -> Array:
        shape = jnp.broadcast_shapes(left.shape, right.shape)
        return operation(broadcast_to(left, shape), broadcast_to(right, shape))

    return broadcasting


def scalar(value: Scalar, dtype: np.dtype) -> Array:
    """A scalar argument (a number or a 0-d array) as a 0-d array of ``dtype``."""
    return jnp.asarray(value).astype(dtype)


def count_as(count: Scalar, dtype: np.dtype) -> TracedValue:
    """A number of elements, or made of one, as a number of ``dtype``; of symbolic sizes as a 0-d array."""
    return dtype.type(count) if isinstance(count, (int, float)) else scalar(count, dtype)


def is_one(value: Scalar) -> bool:
    """Whether a scalar argument is known, before the program runs, to be exactly 1."""
    return isinstance(value, (bool, int, float)) and value == 1


def is_float(dtype: np.dtype) -> bool:
    """Whether ``dtype`` is a real floating-point type, bfloat16 and float8 included."""
    return jnp.issubdtype(dtype, jnp.floating)


def is_complex(dtype: np.dtype) -> bool:
    """Whether ``dtype`` is a complex type."""
    return jnp.issubdtype(dtype, jnp.complexfloating)


def is_integer(dtype: np.dtype) -> bool:
    """Whether ``dtype`` is an integer type; bool is not."""
    return jnp.issubdtype(dtype, jnp.integer)


def opmath_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype PyTorch computes in: float32 for bfloat16, float16 and float8, else ``dtype``."""
    return np.dtype(np.float32) if is_float(dtype) and dtype.itemsize < 4 else np.dtype(dtype)


def opmath(array: Array) -> Array:
    """``array`` in the dtype PyTorch computes in (see ``opmath_dtype``)."""
    wanted = opmath_dtype(array.dtype)
    return array if array.dtype == wanted else array.astype(wanted)


def output_dtype(context: RuleContext, index: int = 0) -> np.dtype:
    """The numpy dtype of one result."""
    return numpy_dtype(_output(context, index).dtype)


def output_shape(context: RuleContext, index: int = 0) -> Shape:
    """The shape of one result."""
    return _output(context, index).shape


def _output(context: RuleContext, index: int) -> TensorMeta:
    meta = context.outputs[index]
    assert meta is not None  # only rules whose results are all wanted ask
    return meta


def normalize_dims(dims: int | Sequence[int] | None, rank: int) -> Shape:
    """``dims`` counted from the front, in ascending order; None or empty means all of them.

    A 0-d array counts as having one dimension in PyTorch, so its result is empty.
    """
    if rank == 0:
        return ()
    if dims is None:
        return tuple(range(rank))
    chosen = (dims,) if isinstance(dims, int) else tuple(dims)
    return tuple(sorted(dim % rank for dim in chosen)) or tuple(range(rank))


def convert(array: Array, dtype: np.dtype) -> Array:
    """``array`` cast to ``dtype`` as PyTorch casts.

    A complex number loses its imaginary part; a float out of range of uint8 wraps around where
    XLA would saturate (PyTorch casts to uint8 through int64).
    """
    if array.dtype == dtype:
        return array
    if is_complex(array.dtype) and not is_complex(dtype) and dtype != np.bool_:
        array = lax.real(array)
    if is_float(array.dtype) and is_integer(dtype) and dtype.itemsize < 4:
        array = array.astype(np.int64 if dtype == np.uint8 else np.int32)
    return array.astype(dtype)
