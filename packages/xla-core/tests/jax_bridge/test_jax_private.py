"""Lowering to StableHLO bytes: aliases, types, locations, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_core.contract.device_protocol import ArraySpec
from xla_core.jax_bridge import jax_private, jaxlib_runtime


def specs(*shapes, dtype="float32"):
    return [ArraySpec(shape, np.dtype(dtype)) for shape in shapes]


def text(function, avals, aliases=(), **options):
    bytecode = jax_private.lower(function, avals, aliases, "cpu", "step", **options)
    return jax_private.module_text(bytecode)


def test_aliases_are_recorded_exactly_as_given():
    # jax's own donation would pair input 0 with output 0: all four have one type
    found = text(lambda a, b, c: (a + 1, b + 1, c + 1), specs((2,), (2,), (2,)), [(0, 2), (2, 1)])
    (signature,) = [line for line in found.splitlines() if "@main" in line]
    arguments = signature.split("->")[0].split("%arg")[1:]
    assert "tf.aliasing_output = 2 " in arguments[0]
    assert "aliasing" not in arguments[1]
    assert "tf.aliasing_output = 1 " in arguments[2]


@pytest.mark.parametrize(
    ("alias", "message"),
    [
        ([(0, 1)], "same shape and dtype"),
        ([(1, 0)], "same shape and dtype"),
        ([(2, 0)], "out of range: the program has 2 inputs and 2 outputs"),
        ([(0, -1)], "out of range"),
        ([(0, 0), (0, 0)], "a second time"),
    ],
)
def test_alias_that_does_not_fit(alias, message):
    avals = [*specs((2,)), *specs((2,), dtype="int32")]
    with pytest.raises(ValueError, match=message):
        jax_private.lower(lambda a, b: (a, b), avals, alias, "cpu", "step")


def test_unused_inputs_stay_and_name_is_kept():
    found = text(lambda a, b, c: b, specs((2,), (3,), (4,)))
    assert "module @step " in found
    assert all(f"tensor<{n}xf32>" in found for n in (2, 3, 4))


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "complex128"])
def test_64_bit_types_whatever_the_configuration(dtype):
    short = {"float64": "f64", "int64": "i64", "uint64": "ui64", "complex128": "complex<f64>"}
    for enabled in (False, True):
        with jax.enable_x64(enabled):
            found = text(lambda a: a * a, specs((2,), dtype=dtype))
        assert f"stablehlo.multiply %arg0, %arg0 : tensor<2x{short[dtype]}>" in found


def traced_here(x):
    return jnp.tanh(x) @ x


def test_bytes_do_not_depend_on_where_the_program_was_traced():
    def from_here():
        return jax_private.lower(traced_here, specs((4, 4)), [], "cpu", "step")

    def from_there():
        return jax_private.lower(lambda x: jnp.tanh(x) @ x, specs((4, 4)), [], "cpu", "step")

    assert from_here() == from_there()
    assert b"test_jax_private" not in from_here()


def test_debug_locations_name_the_file_when_asked():
    found = jax_private.lower(traced_here, specs((4, 4)), [], "cpu", "step", debug_locations=True)
    assert b"test_jax_private" in found
    assert len(found) > len(jax_private.lower(traced_here, specs((4, 4)), [], "cpu", "step"))


def test_callbacks_into_python_are_refused():
    def calls_back(x):
        return jax.pure_callback(np.sin, x, x)

    with pytest.raises(ValueError, match="step calls back into Python"):
        jax_private.lower(calls_back, specs((2,)), [], "cpu", "step")


def test_module_of_a_jitted_function_gives_the_same_program():
    lowered = jax.jit(lambda a: a + 1).lower(jax.ShapeDtypeStruct((2,), np.float32))
    found = jax_private.module_text(jax_private.module_to_bytecode(lowered))
    assert "stablehlo.add" in found and "loc(" not in found


def test_shardings_are_written_and_missing_ones_pinned():
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))

    def constrained(a, b):
        return jax.lax.with_sharding_constraint(a, spread) + b

    found = text(constrained, specs((4,), (4,)), num_partitions=2)
    assert "mhlo.num_partitions = 2" in found
    # without this Shardy would split the inputs too, and the runtime read past their end
    assert found.count("sdy.sharding = #sdy.sharding<@mesh, [{}]>") == 2
    found = text(lambda a, b: a + b, specs((4,), (4,)), num_partitions=2,
                 input_shardings=["{devices=[2]<=[2]}", None])  # fmt: skip
    assert found.count('mhlo.sharding = "{devices=[2]<=[2]}"') == 1
    with pytest.raises(ValueError, match="1 shardings for 2 inputs"):
        text(lambda a, b: a + b, specs((4,), (4,)), input_shardings=["{replicated}"])


def test_sharding_text_that_is_none():
    with pytest.raises(ValueError, match="not an HLO sharding"):
        jaxlib_runtime.hlo_sharding("{device=[2]}")


def test_lowering_starts_no_backend_and_changes_no_configuration():
    """In a process of its own: another test here may have used jax by itself."""
    script = textwrap.dedent(
        """
        import jax, numpy as np, jax.numpy as jnp
        before = {k: v for k, v in jax.config.values.items()}
        from xla_core.jax_bridge import jax_private
        from xla_core.contract.device_protocol import ArraySpec

        def step(a, bits):
            key = jax.random.wrap_key_data(bits)
            noise = jax.random.normal(key, a.shape) + np.arange(4.0) + jnp.asarray(2.5)
            low = jnp.linalg.cholesky(a @ a.T + jnp.eye(4))
            return noise + low, jax.lax.fori_loop(0, 3, lambda i, x: x + i, a), jnp.sort(a)

        avals = [ArraySpec((4, 4), np.dtype(np.float64)), ArraySpec((2,), np.dtype(np.uint32))]
        for platform in ("cpu", "tpu", "cuda"):
            assert jax_private.lower(step, avals, [(0, 0)], platform, "step")
        assert jax_private.backends_started() == (), jax_private.backends_started()
        assert {k: v for k, v in jax.config.values.items()} == before
        assert jnp.zeros(1, "float32").dtype == "float32" and not jax.config.jax_enable_x64
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
