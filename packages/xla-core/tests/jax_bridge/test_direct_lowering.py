"""Small programs are lowered without jax's functions for operations, to what jax makes of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xla_core.jax_bridge import direct_lowering, jax_private
from xla_core.jax_bridge.jax_versions import SINCE_0_11

SHAPE = jax.ShapeDtypeStruct((4, 6), np.float32)
NUMBERS = jax.ShapeDtypeStruct((2,), np.float64)

PROGRAMS = {
    "arithmetic": lambda a, n: a * n[0].astype(np.float32) + n[1].astype(np.float32),
    "product": lambda a, n: jnp.tanh(a @ a.T),
    "reductions": lambda a, n: (a.sum(1), a.max(), jnp.argmin(a, 0)),
    "one value twice": lambda a, n: (a, a + 1, a),
    "constants": lambda a, n: jnp.where(a > 0, a, np.float32(np.inf)),
    "by other operations": lambda a, n: lax.integer_pow(lax.erf_inv(a), 3) + lax.logistic(a),
    "indices": lambda a, n: lax.dynamic_update_slice(a, a[:1, :2], (1, 2)),
    "windows": lambda a, n: lax.cumsum(a, 1),
    "complex": lambda a, n: lax.complex(a, a) * 2,
    "sorted": lambda a, n: lax.sort((a, -a), num_keys=1),
    "an inner function": lambda a, n: jax.jit(lambda b: b * 2, inline=False)(a) + 1,
    "a loop": lambda a, n: lax.fori_loop(0, 3, lambda _, b: b * 2, a),
    "an array": lambda a, n: a + np.arange(24, dtype=np.float32).reshape(4, 6),
    "nothing": lambda a, n: (a, n),
}


def lowered(function):
    module = jax_private.lower_to_module(function, (SHAPE, NUMBERS), (), "cpu", "program")
    return str(module), module.operation.get_asm(enable_debug_info=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_small_program_is_what_jax_makes_of_it(name, monkeypatch):
    ours = lowered(PROGRAMS[name])
    monkeypatch.setattr(direct_lowering, "MOST_OPERATIONS", -1)
    theirs = lowered(PROGRAMS[name])
    assert ours[0] == theirs[0]
    # there jax names the operation that others stand for, and where arguments of a comparison come from
    if name not in ("by other operations", "sorted"):
        assert ours[1] == theirs[1]


@pytest.mark.skipif(SINCE_0_11, reason="jax lowers all programs there")
def test_only_small_programs_are_lowered_so(monkeypatch):
    names = []
    lower_main = direct_lowering.lower_main
    monkeypatch.setattr(
        direct_lowering,
        "lower_main",
        lambda lowering, jaxpr, name: names.append(name) or lower_main(lowering, jaxpr, name),
    )

    def many(count):
        def function(a, n):
            for i in range(count):
                a = a + np.float32(i + 2)
            return a

        return function

    most = direct_lowering.MOST_OPERATIONS
    lowered(many(most))
    assert names == ["program"]
    lowered(many(most + 1))
    lowered(PROGRAMS["an inner function"])
    lowered(PROGRAMS["an array"])
    jax_private.lower(many(2), (SHAPE, NUMBERS), (), "cpu", "program", debug_locations=True)
    assert names == ["program"]


def test_a_value_that_is_needed_while_tracing_is_jaxs_error():
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"float32\[4,6\]|bool"):
        lowered(lambda a, n: a if (a > 0).all() else n)
