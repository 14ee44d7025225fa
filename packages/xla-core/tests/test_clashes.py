"""Calls of kept functions that XLA may compile wrongly are found, and such a step is inlined."""

from __future__ import annotations

import pytest
import torch

import torch_xla
from xla_core import programs, runtime
from xla_core.lowering.clashes import clashes
from xla_core.lowering.outline import KEPT_PREFIX
from xla_core.protocol import Outlining

EAGER = Outlining(wanted=True, min_operations=3, min_saved=3, min_staged=None)

HLO = """HloModule step, is_scheduled=true

%fused (param_0: f32[4], param_1: f32[4]) -> f32[4] {{
  %param_0 = f32[4]{{0}} parameter(0)
  ROOT %add = f32[4]{{0}} add(%param_0, %param_1)
}}

%xla_repeat_0_mul_to_add_3_operations.1.clone (Arg_0.1: f32[4], Arg_1.1: f32[4]) -> (f32[4], f32[4]) {{
  %Arg_0.1 = f32[4]{{0}} parameter(0)
  %Arg_1.1 = f32[4]{{0}} parameter(1)
  %first = f32[4]{{0}} {first}
  %second = f32[4]{{0}} negate(%first)
  ROOT %tuple.1 = (f32[4]{{0}}, f32[4]{{0}}) tuple({returned}), metadata={{op_name="x"}}
}}

ENTRY %main (a: f32[4], b: f32[4]) -> f32[4] {{
  %a = f32[4]{{0}} parameter(0)
  %b = f32[4]{{0}} parameter(1)
  ROOT %call.1 = (f32[4]{{0}}, f32[4]{{0}}) call({given}), to_apply=%xla_repeat_0_mul_to_add_3_operations.1.clone
}}
"""

TOGETHER = "fusion(%Arg_0.1, %Arg_1.1), kind=kLoop, calls=%fused"
ALONE = "negate(%Arg_0.1)"
BOTH = "%first, %second"


@pytest.mark.parametrize(
    ("given", "first", "returned", "expected"),
    [
        ("%a, %b", TOGETHER, BOTH, False),
        ("%a, /*index=1*/%a", TOGETHER, BOTH, True),
        ("%a, %a", ALONE, BOTH, False),
        ("%a, %b", ALONE, "%first, %first", True),
        ("%a, %b", ALONE, "%first, %Arg_1.1", True),
    ],
)
def test_a_call_clashes_when_one_instruction_reads_one_value_under_two_names(
    given, first, returned, expected
):
    assert clashes(HLO.format(given=given, first=first, returned=returned)) is expected


def test_a_program_without_functions_does_not_clash():
    assert not clashes(
        HLO.format(given="%a, %a", first=TOGETHER, returned=BOTH).replace("xla_repeat", "f")
    )


def block(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    z = torch.sin(x.reshape(2, 12).narrow(1, 0, 6).repeat(2, 1)) + y * 0.5
    return torch.tanh(z * x), z


def blocks(start: torch.Tensor, *, equal: bool) -> torch.Tensor:
    # XLA sees that the two are the same, and the first block gets one value twice
    x, y = torch.exp(start), torch.exp(start) if equal else torch.cos(start)
    for _ in range(4):
        x, y = block(x, y)
    return x + y


@pytest.mark.parametrize("equal", [True, False])
def test_a_step_whose_call_gets_what_xla_finds_equal_is_inlined(equal, monkeypatch):
    monkeypatch.setattr(runtime.trace_of(None).backend.client, "outlining", EAGER)
    start = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    given = start.to("xla")
    torch_xla.sync()
    found = blocks(given, equal=equal)
    torch_xla.sync()
    # float32, fused in another way
    torch.testing.assert_close(found.cpu(), blocks(start, equal=equal), rtol=1e-5, atol=1e-6)
    program = programs.all_programs()[-1].program
    assert (KEPT_PREFIX.encode() in program.stablehlo) is not equal
