"""Calls of kept functions that XLA may compile wrongly are found, and those functions inlined."""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest
import torch

import torch_xla
import torch_xla.core.xla_model as xm
from xla_core.compilation import program_table
from xla_core.compilation.build_program import CLASH_COUNTER
from xla_core.contract.device_protocol import Outlining
from xla_core.execution import runtime
from xla_core.lowering.call_alias_check import clashes
from xla_core.support import counters

EAGER = Outlining(wanted=True, min_operations=3, min_saved=3, min_staged=None)

HLO = """HloModule step, is_scheduled=true

%fused (param_0: f32[4], param_1: f32[4]) -> f32[4] {{
  %param_0 = f32[4]{{0}} parameter(0)
  ROOT %add = f32[4]{{0}} add(%param_0, %param_1)
}}

%xla_repeat_0_mul_to_add_3_operations.1.clone (Arg_0.1: f32[4], Arg_1.1: f32[4]) -> (f32[4], f32[4]) {{
  %Arg_0.1 = f32[4]{{0}} parameter(0)
  %Arg_1.1 = f32[4]{{0}} parameter(1)
  %same.1 = f32[2,2]{{1,0}} bitcast(%Arg_0.1)
  %first = f32[4]{{0}} {first}
  %second = f32[4]{{0}} negate(%first)
  ROOT %tuple.1 = (f32[4]{{0}}, f32[4]{{0}}) tuple({returned}), metadata={{op_name="x"}}
}}

ENTRY %main (a: f32[4], b: f32[4]) -> f32[4] {{
  %a = f32[4]{{0}} parameter(0)
  %b = f32[4]{{0}} parameter(1)
  %c = f32[2,2]{{1,0}} bitcast(%a)
  %call.1 = (f32[4]{{0}}, f32[4]{{0}}) call({given}), to_apply=%xla_repeat_0_mul_to_add_3_operations.1.clone
  %d = f32[4]{{0}} get-tuple-element(%call.1), index=0
  %e = f32[4]{{0}} get-tuple-element(%call.1), index=1
  ROOT %f = f32[4]{{0}} fusion({read}), kind=kLoop, calls=%fused
}}
"""

FUNCTION = "xla_repeat_0_mul_to_add_3_operations"
KEPT = {FUNCTION}
TOGETHER = "fusion(%Arg_0.1, %Arg_1.1), kind=kLoop, calls=%fused"
ALONE = "negate(%Arg_0.1)"
WITH_ITSELF = "fusion(%Arg_0.1, %same.1), kind=kLoop, calls=%fused"
BOTH = "%first, %second"


@pytest.mark.parametrize(
    ("given", "first", "returned", "read", "expected"),
    [
        ("%a, %b", TOGETHER, BOTH, "%a, %d", False),
        ("%a, /*index=1*/%a", TOGETHER, BOTH, "%d, %e", True),
        ("%a, %c", TOGETHER, BOTH, "%d, %e", True),
        ("%a, %a", ALONE, BOTH, "%d, %e", False),
        ("%a, %a", WITH_ITSELF, BOTH, "%d, %e", False),
        ("%a, %b", ALONE, "%first, %first", "%d, %e", True),
        ("%a, %b", ALONE, "%first, %first", "%d, %a", False),
        ("%a, %b", ALONE, "%first, %Arg_1.1", "%e, %b", True),
        ("%a, %b", ALONE, "%first, %Arg_1.1", "%e, %a", False),
        ("%a, %b", ALONE, "%first, %same.1", "%e, %a", True),
        ("%a, %b", ALONE, "%first, %same.1", "%a, %c", False),
    ],
)
def test_a_call_clashes_when_one_instruction_reads_one_value_under_two_names(
    given, first, returned, read, expected
):
    found = clashes(HLO.format(given=given, first=first, returned=returned, read=read), KEPT)
    assert found == ({FUNCTION} if expected else set())


def test_a_program_without_functions_does_not_clash():
    text = HLO.format(given="%a, %a", first=TOGETHER, returned=BOTH, read="%d, %e")
    assert not clashes(text.replace("xla_repeat", "f"), set())


def test_a_program_of_which_xla_has_removed_all_calls_does_not_clash(caplog):
    """Functions of clones compute nothing."""
    client = runtime.trace_of(None).backend.client
    before = count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "outlining", EAGER)
        given = [torch.full((3,), float(i)).to("xla") for i in range(12)]
        found = [functools.reduce(lambda x, _: x.clone(), range(12), x) for x in given]
        torch_xla.sync()
    assert [x.tolist() for x in found] == [[float(i)] * 3 for i in range(12)]
    assert count() == before
    assert not caplog.text


FINE = HLO.format(given="%a, %b", first=TOGETHER, returned=BOTH, read="%a, %d")
CALL = next(line for line in FINE.splitlines() if " call(" in line)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("xla_repeat_0", "outlined", id="functions renamed"),
        pytest.param("xla_repeat_0_mul", "xla_repeat_9_mul", id="a function of another name"),
        pytest.param(" to_apply=%", " to_apply=", id="names without a sign"),
        pytest.param("to_apply=", "calls=", id="another attribute"),
        pytest.param(" call(", " async-call(", id="another operation"),
        pytest.param(CALL, "", id="no call"),
        pytest.param("%call.1 = ", "call.1: ", id="another form of instructions"),
        pytest.param("negate(%first)", "negate(first)", id="operands without a sign"),
        pytest.param("negate(%first)", "negate %first", id="operands without parentheses"),
        pytest.param("negate(%first)", "negate(%before)", id="an operand that no line names"),
        pytest.param("parameter(1)", "parameter(2)", id="a parameter too many"),
        pytest.param("  %Arg_1.1 = f32[4]{0} parameter(1)\n", "", id="a parameter too few"),
        pytest.param("index=1", "element 1", id="another form of tuple elements"),
        pytest.param("  ROOT %tuple.1", "  %tuple.1", id="no result"),
        pytest.param("ENTRY %main", "MAIN %main", id="no entry"),
        pytest.param(
            "(f32[4], f32[4]) {", "(f32[4], f32[4])\n{", id="another form of computations"
        ),
        pytest.param(" -> f32[4] {\n  %a", " -> f32[4] =\n  %a", id="another form of the entry"),
        pytest.param(
            "kind=kLoop", f"kind=kLoop, to_apply=%{'xla_repeat_0'}", id="called by others"
        ),
    ],
)
def test_what_is_not_understood_clashes(old, new, caplog):
    assert clashes(FINE, KEPT) == set()
    changed = FINE.replace(old, new)
    assert changed != FINE
    assert clashes(changed, KEPT) == KEPT
    assert "is not in the form of jaxlib 0.10.2" in caplog.text


def test_a_call_from_another_computation_is_not_understood():
    loop = CALL.replace("%call.1", "ROOT %call.2")
    text = FINE.replace("ENTRY", f"%body (p: f32[4]) -> f32[4] {{\n{loop}\n}}\n\nENTRY")
    assert clashes(text, KEPT) == KEPT


def test_names_in_metadata_are_no_calls():
    quoted = 'kind=kLoop, metadata={op_name="jit(xla_repeat_0)/to_apply=%xla_repeat_1"}'
    assert clashes(FINE.replace("kind=kLoop", quoted), KEPT) == set()


def test_where_the_text_is_not_understood_all_is_inlined(monkeypatch):
    client = runtime.trace_of(None).backend.client
    monkeypatch.setattr(client, "outlining", EAGER)
    former = type(client).executable_type.optimized_hlo
    monkeypatch.setattr(
        type(client).executable_type,
        "optimized_hlo",
        lambda self: former(self).replace(" to_apply=%xla", " applied=%xla"),
    )
    start = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    given = start.to("xla")
    torch_xla.sync()
    runtime.trace_of(None).forget()
    before = count()
    found = blocks(given, equal=True)
    torch_xla.sync()
    assert count() > before
    (program,) = [p for p in program_table.all_programs() if p.operations > 20][-1:]
    assert " call(" not in former(program.executable)
    torch.testing.assert_close(found.cpu(), blocks(start, equal=True))


def block(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    z = torch.sin(x.reshape(2, 12).narrow(1, 0, 6).repeat(2, 1)) + y * 0.5
    return torch.tanh(z * x), z


def blocks(start: torch.Tensor, *, equal: bool) -> torch.Tensor:
    # XLA sees that the two are the same, and the first block gets one value twice
    x, y = torch.exp(start), torch.exp(start) if equal else torch.cos(start)
    for _ in range(4):
        x, y = block(x, y)
    return x + y


def plain(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid((x * 0.25 + 1.0).abs()) - 0.5


def count() -> int:
    return counters.all_counters().get(CLASH_COUNTER, 0)


@pytest.mark.parametrize("staged", ["0", "1"])
@pytest.mark.parametrize("equal", [True, False])
def test_only_the_function_that_gets_what_xla_finds_equal_is_inlined(equal, staged, monkeypatch):
    eager = dataclasses.replace(EAGER, min_stage=0)
    monkeypatch.setattr(runtime.trace_of(None).backend.client, "outlining", eager)
    monkeypatch.setenv("XLA_STEP_STAGES", staged)
    start = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    given = start.to("xla")
    torch_xla.sync()
    runtime.trace_of(None).forget()
    before = count()

    def run(x: torch.Tensor) -> torch.Tensor:
        x = blocks(x, equal=equal)
        for _ in range(4):
            x = plain(x)
        return x

    found = run(given)
    torch_xla.sync()
    # float32, fused in another way
    torch.testing.assert_close(found.cpu(), run(start), rtol=1e-5, atol=1e-6)
    # in stages the two are arguments of another program, which cannot know
    assert count() - before == (equal and staged == "0")
    step = program_table.all_programs()[-1]
    if staged == "0":
        called = re.findall(r"to_apply=%xla_repeat_\d+_(\w+?)_\d+", step.executable.optimized_hlo())
        assert set(called) == ({"mul_to_sub"} if equal else {"mul_to_sub", "slice_to_tanh"})


def around_a_barrier(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    z = torch.tanh((torch.cos(x * 0.5) + 1.0) * x) * 0.25
    same = x.clone()
    if x.device.type == "xla":
        # XLA drops it later: the function returns what it was given
        xm.optimization_barrier_([same])
    return z.abs().sqrt(), same


# no two alike: they stay outside of functions
READERS = (
    lambda z, same, row: z + row.sin() + same * 0.5,
    lambda z, same, row: z - same * 0.25 + row.sin().exp(),
    lambda z, same, row: z * same - row.cos(),
    lambda z, same, row: z + same.sigmoid() * row.sin(),
)


def test_a_function_that_returns_its_operand_in_the_end_is_inlined(monkeypatch):
    monkeypatch.setattr(runtime.trace_of(None).backend.client, "outlining", EAGER)

    def run(x: torch.Tensor) -> torch.Tensor:
        for number, read in enumerate(READERS):
            z, same = around_a_barrier(x)
            row = x.reshape(2, 12).narrow(1, 2 * number, 6).repeat(2, 1)
            x = read(z, same, row)
        return x

    start = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    given = start.to("xla")
    torch_xla.sync()
    before = count()
    found = run(given)
    torch_xla.sync()
    torch.testing.assert_close(found.cpu(), run(start), rtol=1e-5, atol=1e-6)  # float32, fused
    assert count() > before
