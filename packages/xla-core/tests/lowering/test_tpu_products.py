"""Products of bfloat16 for a TPU: results are bfloat16 at once, which is what devices add up over a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from xla_core.lowering.rules.matmul import mm
from xla_core.operators.target import Target, lowering_for


@pytest.mark.parametrize(
    ("platform", "dtype", "result"),
    [
        ("tpu", jnp.bfloat16, jnp.bfloat16),
        ("cpu", jnp.bfloat16, jnp.float32),
        ("tpu", jnp.float16, jnp.float32),
        ("tpu", jnp.float32, jnp.float32),
    ],
)
def test_the_dtype_that_a_product_is_asked_for_in(platform, dtype, result):
    left, right = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((4, 8), (8, 2)))
    with lowering_for(Target(platform)):
        # a function of its own: jax remembers what it traced, and knows nothing of targets
        steps = jax.make_jaxpr(lambda a, b: mm(a, b))(left, right).eqns
    (product,) = (step for step in steps if step.primitive.name == "dot_general")
    assert product.outvars[0].aval.dtype == result
    assert steps[-1].outvars[0].aval.dtype == dtype
