"""A builder's operations over windows under jax: convolutions, reductions and pooling."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_core.builder.hlo import XlaComputation
from xla_core.builder.hlo_registry import named
from xla_core.jax_bridge import hlo_primitives
from xla_core.torch_bridge.operands import Operand

# -- convolutions ---------------------------------------------------------------------------------


def _convolve(
    x: jax.Array,
    kernel: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    **options: Operand,
) -> object:
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


@named("Conv")
@named("ConvWithGeneralPadding")
@named("ConvWithGeneralDimensions")
@named("ConvGeneral")
def _conv(
    x: jax.Array,
    kernel: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]] = "valid",
    **options: object,
) -> jax.Array:
    return _convolve(x, kernel, window_strides, padding, **options)


@named("ConvGeneralDilated")
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


@named("Reduce")
def _reduce(
    x: jax.Array, init: jax.Array, computation: XlaComputation, dimensions: Sequence[int]
) -> jax.Array:
    return lax.reduce(x, init, computation, tuple(dimensions))


@named("ReduceAll")
def _reduce_all(x: jax.Array, init: jax.Array, computation: XlaComputation) -> jax.Array:
    return lax.reduce(x, init, computation, tuple(range(x.ndim)))


@named("ReduceWindow")
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


@named("MaxPool")
def _max_pool(
    x: jax.Array,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    batch_dimension: int,
    feature_dimension: int,
    spatial_dimensions: Sequence[int],
    padding: str = "valid",
) -> jax.Array:
    del (
        batch_dimension,
        feature_dimension,
        spatial_dimensions,
    )  # kernel_size and stride cover all dimensions
    floating = jnp.issubdtype(x.dtype, jnp.inexact)
    lowest = np.array(-np.inf if floating else jnp.iinfo(x.dtype).min, x.dtype)
    return lax.reduce_window(x, lowest, lax.max, tuple(kernel_size), tuple(stride), padding.upper())


@named("SelectAndScatter")
@named("SelectAndScatterWithGeneralPadding")
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
