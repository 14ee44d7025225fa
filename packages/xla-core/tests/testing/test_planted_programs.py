"""Random programs with planted repeats: inlined, as functions and in stages they compute what the CPU does.

Blocks of operators repeat, some with one constant, one slice or one edge changed; tensors of one block
are written by another, also through views; any value may be kept.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch

import torch_xla
from xla_core.compilation import program_table
from xla_core.compilation.program_table import StepProgram
from xla_core.compilation.staged_executable import StagedExecutable
from xla_core.contract.device_protocol import Outlining
from xla_core.execution import runtime
from xla_core.lowering.outline_functions import KEPT_PREFIX

SHAPE = (4, 6)
# Blocks this short are worth no function to a device; here they become one wherever they repeat.
EAGER = Outlining(wanted=True, min_operations=3, min_saved=3, min_staged=0, min_stage=0)
INLINED = ("XLA_OUTLINE_REPEATS", "0")
OUTLINED = ("XLA_STEP_STAGES", "0")
STAGED = ("XLA_STEP_STAGES", "1")

Values = list[torch.Tensor]
Operation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, int], torch.Tensor]


def _write_row(x, y, w, c, i):
    x[i] += y[i] * c
    return x


def _write_block(x, y, w, c, i):
    x.t()[i : i + 2].mul_(c).add_(y.t()[:2] * c)
    return x


def _swap_halves(x, y, w, c, i):
    left, right = x.chunk(2, 1)
    return torch.cat((right, left * c), 1)


def _both(x, y, w, c, i):
    # one list operator writes the block's own value and one from outside
    own = x.clone()
    torch._foreach_mul_([own, y], [c, 0.5])
    return own + y


OPERATIONS: tuple[Operation, ...] = (
    lambda x, y, w, c, i: torch.tanh(x + y),
    lambda x, y, w, c, i: (x * y).sigmoid(),
    lambda x, y, w, c, i: x * c - y,
    lambda x, y, w, c, i: torch.tanh(x @ w),
    lambda x, y, w, c, i: x.mul_(c),
    lambda x, y, w, c, i: x.reshape(6, 4).t().sin(),
    lambda x, y, w, c, i: torch.ones_like(x) * c,
    lambda x, y, w, c, i: torch.where(x > c, x, y),
    lambda x, y, w, c, i: x[i].expand(SHAPE).cos(),
    lambda x, y, w, c, i: torch.softmax(x, i % 2),
    lambda x, y, w, c, i: x.reshape(2, 12).narrow(1, i, 6).repeat(2, 1),
    lambda x, y, w, c, i: x.detach(),
    _write_row,
    _write_block,
    _swap_halves,
    _both,
)


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a block: the operator, how far back its second operand is, its constants."""

    operation: int
    back: int
    number: float
    place: int


def make_line(source: random.Random) -> Line:
    return Line(
        source.randrange(len(OPERATIONS)),
        source.randrange(1, 7),
        source.choice((0.25, 0.5, 0.75)),
        source.randrange(3),
    )


def make_program(source: random.Random) -> list[Line]:
    """Blocks one after the other: equal ones, nearly equal ones, parts of others."""
    blocks = [[make_line(source) for _ in range(source.randrange(3, 9))] for _ in range(2)]
    program: list[Line] = []
    for _ in range(source.randrange(4, 9)):
        block = list(source.choice(blocks))
        change = source.random()
        if change < 0.3:
            at = source.randrange(len(block))
            other = make_line(source)
            field = source.choice(("operation", "back", "number", "place"))
            block[at] = dataclasses.replace(block[at], **{field: getattr(other, field)})
        elif change < 0.45:
            block = block[source.randrange(len(block)) :]
        program += block
    return program


def run(program: list[Line], kept: list[int], start: Values, weight: torch.Tensor) -> Values:
    """The values at the lines ``kept``, and the given tensors, which are written to as well."""
    values = [*start]
    for line in program:
        x, y = values[-1], values[max(len(values) - 1 - line.back, 0)]
        made = OPERATIONS[line.operation](x, y, weight, line.number, line.place)
        values.append(made)
    return [*(values[len(start) + k] for k in kept), *start]


def on_device(
    program: list[Line], kept: list[int], start: Values, weight: torch.Tensor
) -> tuple[Values, StepProgram]:
    given = [t.clone().to("xla") for t in start]
    weight = weight.to("xla")
    torch_xla.sync()
    runtime.trace_of(None).forget()  # the same step was compiled in another way before
    found = run(program, kept, given, weight)
    torch_xla.sync()
    step = program_table.all_programs()[-1]
    return [t.cpu() for t in found], step


def compare(seed: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run one program in all ways, and say whether anything in it became a function."""
    source = random.Random(seed)
    program = make_program(source)
    kept = sorted(source.sample(range(len(program)), min(4, len(program))))
    generator = torch.Generator().manual_seed(seed)
    start = [torch.randn(SHAPE, generator=generator) for _ in range(2)]
    weight = torch.randn(6, 6, generator=generator)
    expected = run(program, kept, [t.clone() for t in start], weight)
    monkeypatch.setattr(runtime.trace_of(None).backend.client, "outlining", EAGER)
    steps = {}
    for name, value in (INLINED, OUTLINED, STAGED):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            found, steps[name, value] = on_device(program, kept, start, weight)
        for place, one, other in zip((*kept, "a", "b"), found, expected, strict=True):
            # float32 through some dozens of operators, fused in other ways
            text = f"program {seed}, {name}={value}, line {place}:\n{{}}".format
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=text)
    assert KEPT_PREFIX.encode() not in steps[INLINED].program.stablehlo
    outlined = KEPT_PREFIX.encode() in steps[OUTLINED].program.stablehlo
    assert isinstance(steps[STAGED].executable, StagedExecutable) == outlined
    return outlined


def test_inlined_outlined_and_staged_are_the_same(monkeypatch):
    outlined = [compare(seed, monkeypatch) for seed in range(12)]
    assert sum(outlined) > 6


def test_a_view_is_folded_into_some_values_and_left_to_the_readers_of_others(monkeypatch):
    def run(x: torch.Tensor, weights: Values) -> Values:
        kept = []
        for number, weight in enumerate(weights):
            made = torch.tanh(x + weight)
            if number < 2:
                kept.append(made)  # as it is: whoever reads it has to transpose it
            seen = made.t()
            x = ((seen * 0.5).sin() + seen.cos()).sigmoid().abs() + 0.25
        return [x, *kept]

    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(4, 4, generator=generator) for _ in range(6)]
    start = torch.randn(4, 4, generator=generator)
    monkeypatch.setattr(runtime.trace_of(None).backend.client, "outlining", EAGER)
    given, x = [w.to("xla") for w in weights], start.to("xla")
    torch_xla.sync()
    found = run(x, given)
    torch_xla.sync()
    for one, other in zip(found, run(start, weights), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-6)  # float32, fused


def test_a_value_that_a_call_takes_twice_is_not_written_while_it_is_read(monkeypatch):
    # the first block takes one value in two places, the second two values
    compare(479, monkeypatch)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(12, 512))
def test_many_programs_are_the_same(seed, monkeypatch):
    compare(seed, monkeypatch)
