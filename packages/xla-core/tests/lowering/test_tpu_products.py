"""Products for a TPU: the dtype of bfloat16 ones, which devices add up over a mesh, and what two of them read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from xla_core.lowering.rules.matmul import linear_backward, mm
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


@pytest.mark.parametrize(
    ("platform", "wanted", "outputs", "kept"),
    [
        ("tpu", [True, True, False], 32, True),
        ("tpu", [True, True, False], 33, False),  # a vocabulary
        ("tpu", [False, True, True], 32, False),
        ("cpu", [True, True, True], 32, False),
    ],
)
def test_a_gradient_that_two_products_read_is_computed_in_front_of_them(
    platform, wanted, outputs, kept
):
    shapes = ((3, 4, 8), (3, 4, outputs), (outputs, 8))
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with lowering_for(Target(platform)):
        traced = jax.make_jaxpr(lambda x, g, w: linear_backward(x, jnp.exp(g), w, wanted))
        steps = traced(*operands).eqns
    assert ("optimization_barrier" in [step.primitive.name for step in steps]) == kept
