"""Programs that may be run once more are told from those that may not, by their StableHLO."""

from __future__ import annotations

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from xla_core.jax_bridge import jax_private
from xla_core.pjrt.rehearsal_safety import only_computes


def bytecode(function, *shape: int) -> bytes:
    """MLIR bytecode of ``function`` of one float32 array."""
    traced = jax.jit(function).trace(jax.ShapeDtypeStruct(shape, np.float32))
    module = traced.lower(lowering_platforms=("cpu",)).compiler_ir()
    written = io.BytesIO()
    module.operation.write_bytecode(written)
    return written.getvalue()


def on_a_mesh(function):
    mesh = AbstractMesh((2,), ("i",), axis_types=(AxisType.Auto,))
    whole = PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)


def no_loops() -> str:
    raise AssertionError("the text of a program without loops is not needed")


COMPUTING = {
    "arithmetic": lambda x: jnp.tanh(x @ x) / 0,
    "reductions": lambda x: (x.sum(0), x.max(), jnp.cumsum(x, 0)),
    "gather": lambda x: x[x[0].astype(int)].at[2].add(1),
    "branches": lambda x: lax.cond(x[0, 0] > 0, lambda: x, lambda: -x),
    # a name is no operation
    "while in a name": lambda x: jax.named_call(jnp.sin, name="meanwhile.send")(x),
}
OTHERS = {
    "library": jnp.linalg.cholesky,
    "callback": lambda x: jax.pure_callback(np.sin, x, x),
    "all_reduce": on_a_mesh(lambda x: lax.psum(x, "i")),
    "all_gather": on_a_mesh(lambda x: lax.all_gather(x, "i")),
    "all_to_all": on_a_mesh(lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True)),
    "permute": on_a_mesh(lambda x: lax.ppermute(x, "i", [(0, 0)])),
    "reduce_scatter": on_a_mesh(lambda x: lax.psum_scatter(x, "i", tiled=True)),
}


@pytest.mark.parametrize("name", COMPUTING)
def test_what_only_computes(name):
    assert only_computes(bytecode(COMPUTING[name], 4, 4), no_loops)


@pytest.mark.parametrize("name", OTHERS)
def test_what_may_do_more(name):
    assert not only_computes(bytecode(OTHERS[name], 4, 4), str)


@pytest.mark.parametrize("program", [b"", b"module {}", b"ML\xefR\rStableHLO_v1.0\0vhlo\0add_v1\0"])
def test_what_is_not_understood(program):
    assert not only_computes(program, str)


SHORT = '  %a = f32[] while(%t), body=%b, backend_config={"known_trip_count":{"n":"5"}}'
LOOPS = {
    "": True,
    SHORT: True,
    f"{SHORT}\n  %meanwhile = f32[] add(%x, %y)\n{SHORT}": True,
    SHORT.replace('"5"', '"5000"'): False,
    "  ROOT %a = f32[] while(%t), condition=%c, body=%b": False,
    f"{SHORT}\n  ROOT %a = f32[] while(%t), condition=%c, body=%b": False,
}


@pytest.mark.parametrize("hlo", LOOPS)
def test_a_loop_must_be_known_to_be_short(hlo):
    program = bytecode(lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x), 4)
    text = f"HloModule step\n\nENTRY %main (x: f32[4]) -> f32[4] {{\n{hlo}\n}}\n"
    assert only_computes(program, lambda: text) is LOOPS[hlo]
    assert not only_computes(program, lambda: hlo)  # whatever that is


def test_loops_of_another_form_are_not_known_to_be_short():
    program = bytecode(lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x), 4)
    text = f"HloModule step\n\nENTRY %main (x: f32[4]) -> f32[4] {{\n{SHORT}\n}}\n"
    assert only_computes(program, lambda: text)
    for old, new in (
        (" while(", "\twhile("),
        (" while(", " while <"),
        ("ENTRY %main", "entry main"),
        ("known_trip_count", "trip_count"),
    ):
        changed = text.replace(old, new)
        assert changed != text
        assert not only_computes(program, lambda changed=changed: changed)


def test_an_operation_that_is_not_known_may_do_more(monkeypatch):
    program = bytecode(COMPUTING["arithmetic"], 4, 4)
    names = jax_private.operation_names(program)
    assert names is not None and "stablehlo.tanh" in names
    for other in ("stablehlo.async_start", "acme.add", "chlo"):
        monkeypatch.setattr(jax_private, "operation_names", lambda _, other=other: names | {other})
        assert not only_computes(program, no_loops)
