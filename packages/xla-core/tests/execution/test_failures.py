"""Steps that cannot be computed: what they cost, what is said, and that the next step runs."""

from __future__ import annotations

import jax
import pytest
import torch
from jax.extend.core import Primitive

import torch_xla
from xla_core.execution import runtime
from xla_core.jax_bridge import jax_private
from xla_core.launching import program_launch

HUGE = 1 << 22
"""A square of float32 of 64 TB: more than any machine's address space grants."""


@pytest.fixture
def weight():
    made = torch.ones(3, device="xla")
    torch_xla.sync()
    return made


def usable(weight, expected):
    assert weight.tolist() == expected
    weight.mul_(2)
    torch_xla.sync()
    assert weight.tolist() == [2 * e for e in expected]


def test_out_of_memory_names_the_lines_of_the_largest_values_and_costs_only_the_step(weight):
    row = torch.ones(1, HUGE, device="xla")
    torch_xla.sync()
    weight.add_(1)
    big = row.t() + row  # this line
    loss = big.exp().sum() * 0 + big[0, 0]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch_xla.sync()
    text = str(caught.value)
    assert "RESOURCE_EXHAUSTED" in text and "What helps" in text
    line = test_out_of_memory_names_the_lines_of_the_largest_values_and_costs_only_the_step
    number = line.__code__.co_firstlineno + 4
    assert f"64.00TB float32[{HUGE},{HUGE}]" in text
    assert f"test_failures.py:{number}" in text
    with pytest.raises(RuntimeError, match="never computed"):
        loss.item()
    usable(weight, [1, 1, 1])


def test_a_program_that_xla_refuses_costs_only_its_step(weight, monkeypatch):
    kept = weight * 5
    torch_xla.sync()
    weight.add_(1)
    gone = weight * 3.5

    def refuse(_program):
        raise RuntimeError("UNIMPLEMENTED: not on this device")

    with monkeypatch.context() as patch:
        patch.setattr(runtime.client(), "compile", refuse)
        with pytest.raises(RuntimeError, match="not on this device"):
            torch_xla.sync()
    torch_xla.sync()
    assert kept.tolist() == [5, 5, 5]
    with pytest.raises(RuntimeError, match=r"never computed.*not on this device"):
        gone.tolist()
    usable(weight, [1, 1, 1])


def test_a_launch_that_fails_costs_only_its_step(weight, monkeypatch):
    weight.add_(1)
    gone = weight * 4.5

    def fail(*_args, **_keywords):
        raise RuntimeError("INTERNAL: the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(program_launch, "execution", lambda *_: map(fail, (1,)))
        with pytest.raises(RuntimeError, match="the device is gone"):
            torch_xla.sync()
    with pytest.raises(RuntimeError, match=r"never computed.*the device is gone"):
        gone.tolist()
    usable(weight, [1, 1, 1])


@pytest.fixture
def picky_digamma(replace_rule):
    """An operator whose lowering rule fails for two elements only."""

    def change(function):
        def picky(x):
            if x.shape == (2,):
                raise ValueError("no such luck")
            return function(x)

        return picky

    replace_rule(torch.ops.aten.digamma.default, change)


def test_a_failed_lowering_names_the_line_and_spares_the_operator_elsewhere(weight, picky_digamma):
    fine = torch.full((3,), 2.0, device="xla").digamma()
    gone = torch.full((2,), 2.0, device="xla").digamma()
    weight.add_(gone.sum())
    number = test_a_failed_lowering_names_the_line_and_spares_the_operator_elsewhere
    place = f"test_failures.py:{number.__code__.co_firstlineno + 2}"
    with pytest.raises(RuntimeError, match=rf"aten\.digamma.*{place}.*no such luck"):
        torch_xla.sync()
    torch.testing.assert_close(fine.cpu(), torch.full((3,), 2.0).digamma())
    with pytest.raises(RuntimeError, match="never computed"):
        gone.tolist()
    usable(weight, [1, 1, 1])


def _refused_by_xla(x):
    return jax.ffi.ffi_call("nobody_knows_this", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


_UNHEARD_OF = Primitive("nobody_knows_this")
_UNHEARD_OF.def_abstract_eval(lambda x: x)


@pytest.fixture(params=[_refused_by_xla, _UNHEARD_OF.bind], ids=["compiling", "lowering"])
def unheard_of_digamma(replace_rule, request):
    """An operator whose rule gives for two elements what XLA, or jax before it, refuses without its name."""

    def change(function):
        return lambda x: request.param(x) if x.shape == (2,) else function(x)

    replace_rule(torch.ops.aten.digamma.default, change)


def test_an_operation_that_xla_refuses_namelessly_is_found(weight, unheard_of_digamma):
    fine = torch.full((3,), 2.0, device="xla").digamma()
    gone = (torch.full((2,), 2.0, device="xla") + 1).digamma()
    later = gone.exp()
    weight.add_(later.sum())
    kept = fine + 1
    number = test_an_operation_that_xla_refuses_namelessly_is_found
    place = f"test_failures.py:{number.__code__.co_firstlineno + 2}"
    with pytest.raises(RuntimeError, match=rf"aten\.digamma.*{place}.*nobody_knows_this") as caught:
        torch_xla.sync()
    assert "aten.digamma" not in str(caught.value.__cause__)  # what XLA itself says
    torch.testing.assert_close(kept.cpu(), torch.full((3,), 2.0).digamma() + 1)
    for lost in (gone, later):
        with pytest.raises(RuntimeError, match=rf"never computed.*{place}"):
            lost.tolist()
    usable(weight, [1, 1, 1])


def test_several_operations_that_xla_refuses(weight, unheard_of_digamma, replace_rule):
    def change(function):
        return lambda x: jax.ffi.ffi_call("nor_this", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    replace_rule(torch.ops.aten.lgamma.default, change)
    start = torch.full((2,), 2.0, device="xla")
    one, other, fine = start.digamma(), start.lgamma(), start.exp()
    with pytest.raises(RuntimeError, match=r"aten\.digamma"):
        torch_xla.sync()
    assert fine.tolist() == start.cpu().exp().tolist()
    for lost, operator in ((one, "digamma"), (other, "lgamma")):
        with pytest.raises(RuntimeError, match=f"never computed.*{operator}"):
            lost.tolist()
    usable(weight, [1, 1, 1])


def test_operations_that_xla_refuses_together_only(weight, monkeypatch):
    """No operation alone is to blame: the one with which the program became impossible is."""
    client = runtime.client()
    compile_ = client.compile
    tried = []

    def refuse(program):
        tried.append(program)
        text = jax_private.module_text(program.stablehlo)
        if "stablehlo.tan" in text and "stablehlo.floor" in text:
            raise RuntimeError("UNIMPLEMENTED: not in one program")
        return compile_(program)

    monkeypatch.setattr(client, "compile", refuse)
    start = torch.full((5,), 2.0, device="xla")
    first = start
    for _ in range(20):
        first = first * 1.5 + start
    second = first.floor() + 2
    third = (second + first).sigmoid() + 1
    fourth = third.tan()
    fifth = fourth * 2
    apart = start.exp()
    weight.add_(fifth.sum())
    number = test_operations_that_xla_refuses_together_only
    place = f"test_failures.py:{number.__code__.co_firstlineno + 20}"
    with pytest.raises(RuntimeError, match=rf"(?s)aten\.tan.*{place}.*not in one program"):
        torch_xla.sync()
    assert len(tried) < 25
    for kept in (second, third, apart):
        assert kept.isfinite().all()
    with pytest.raises(RuntimeError, match="never computed"):
        fourth.tolist()
    usable(weight, [1, 1, 1])
