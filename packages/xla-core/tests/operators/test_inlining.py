"""Rules are traced without the calls that jax makes of its own functions, and their loops stay loops."""

from __future__ import annotations

import importlib
import pkgutil

import jax
import jax.numpy as jnp
import pytest
import torch
from jax._src import config
from jax._src.lax import control_flow
from jax._src.lax.control_flow import loops as jax_loops

import torch_xla
from xla_core.compilation import disk_cache
from xla_core.jax_bridge import jax_private, mlir_contexts
from xla_core.lowering import rules
from xla_core.operators import inlining

PLAIN = [
    found.name
    for found in pkgutil.iter_modules(rules.__path__)
    if inlining._is_plain(f"{rules.__name__}.{found.name}")
]


def module_of(function, *operands):
    shapes = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in operands]
    lowered = jax_private.lower(function, shapes, (), "cpu", "step")
    return jax_private.module_text(lowered)


def test_the_list_names_modules_of_rules():
    assert set(PLAIN) == set(inlining._PLAIN)
    for name in PLAIN:
        importlib.import_module(f"{rules.__name__}.{name}")


def test_a_plain_rule_makes_no_functions(monkeypatch):
    """The module of a step has one function, where jax would make one for each of its own."""
    texts = []
    lower = jax_private.lower
    monkeypatch.setattr(
        jax_private, "lower", lambda *a, **k: texts.append(lower(*a, **k)) or texts[-1]
    )
    monkeypatch.setattr(disk_cache, "current", lambda: None)
    x = torch.arange(11.0).to("xla")
    found = torch.where(x > 2, x.softmax(0), x * 3).sum() + x.var()
    expected = torch.arange(11.0)
    expected = torch.where(expected > 2, expected.softmax(0), expected * 3).sum() + expected.var()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    (text,) = map(jax_private.module_text, texts)
    assert text.count("func.func") == 1
    assert module_of(lambda a: jnp.where(a > 2, a, 1), jnp.zeros(3)).count("func.func") > 1


def test_loops_stay_loops(monkeypatch):
    """A loop that jax unrolls makes programs as long as it runs."""
    unrolled = []

    def watched(inner):
        def loop(*args, **kwargs):
            unrolled.extend([inner.__name__] * config.disable_jit.value)
            return inner(*args, **kwargs)

        return loop

    for name in ("scan", "while_loop", "fori_loop"):
        for module in (control_flow, jax_loops, jax.lax):
            monkeypatch.setattr(module, name, watched(getattr(module, name)))
    boundaries = torch.arange(5000.0)
    values = torch.tensor([3.5, -1.0, 7000.0])
    found = torch.bucketize(values.to("xla"), boundaries.to("xla"))
    assert found.tolist() == torch.bucketize(values, boundaries).tolist()
    # a decomposition and random numbers have loops of their own
    torch.nn.functional.dropout(torch.ones(7, device="xla"), 0.5).cpu()
    torch.special.i0e(torch.ones(7, device="xla")).cpu()
    assert not unrolled


def test_contexts_are_used_again_and_replaced(monkeypatch):
    monkeypatch.setattr(mlir_contexts, "MOST_USES", 3)
    monkeypatch.setattr(mlir_contexts._kept, "context", None)
    met = [mlir_contexts.context() for _ in range(5)]
    assert met[0] is met[2] and met[3] is not met[2] and met[3] is met[4]
    mlir_contexts.count(mlir_contexts.MOST_BYTES + 1)
    assert mlir_contexts.context() is not met[4]
    # a module outlives the replacement of its context
    assert module_of(lambda a: a + 1, jnp.zeros(3)).count("stablehlo.add") == 1
    torch_xla.sync()
