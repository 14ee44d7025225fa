"""Rules of primitives with parameters that no operator of PyTorch needs, run on a traced function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xla_core.jax_bridge import symbolic_sizes
from xla_core.varying import interpreter
from xla_core.varying.padded import Frame, Padded, dim_of

BOUND = 320


def on_padded(function, array):
    """``function`` of ``array``, computed on an array of ``BOUND`` places; the padding is NaN."""
    (size,) = symbolic_sizes.symbols(("n",), ("n >= 2", f"n <= {BOUND}"))
    traced = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((size,), array.dtype))
    padded = np.full(BOUND, np.nan, array.dtype)
    padded[: len(array)] = array
    kinds = []

    @jax.jit  # as one program: by itself each operation of a scan would be one
    def run(padded, length):
        value = Padded(padded, (dim_of(size),))
        (result,) = interpreter.run(Frame({"n": length}), traced.jaxpr, traced.consts, [value])
        kinds.append(type(result))
        return result.array if isinstance(result, Padded) else result

    result = np.asarray(run(padded, len(array)))
    return result[: len(array)] if kinds[0] is Padded else result


@pytest.mark.parametrize("reverse", [False, True])
def test_cumlogsumexp_from_either_end(reverse):
    def function(array):
        return lax.cumlogsumexp(array, axis=0, reverse=reverse)

    array = np.linspace(-3, 3, 7, dtype=np.float32)
    np.testing.assert_allclose(on_padded(function, array), jax.jit(function)(array), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32])
def test_slices_that_start_at_a_narrow_integer(dtype):
    def function(array):
        return lax.dynamic_slice(array, (jnp.asarray(100, dtype),), (2,))

    array = np.arange(300, dtype=np.float32)
    np.testing.assert_array_equal(on_padded(function, array), function(array))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32])
def test_updates_that_start_at_a_narrow_integer(dtype):
    def function(array):
        part = jnp.full((2,), -1, array.dtype)
        return lax.dynamic_update_slice(array, part, (jnp.asarray(100, dtype),))

    array = np.arange(300, dtype=np.float32)
    # jax without jit writes at 42: it clamps to the largest start, 298, converted to 8 bits
    expected = array.copy()
    expected[100:102] = -1
    np.testing.assert_array_equal(on_padded(function, array), expected)
