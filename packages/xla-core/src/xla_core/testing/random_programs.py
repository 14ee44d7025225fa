"""Random programs of tensor operations, and the comparison of two devices that run them.

A program is made from a seed, instruction by instruction, while a CPU machine runs it: that is how
the generator knows shapes, dtypes and what PyTorch refuses. ``difference`` then runs it on the
CPU and on another device from the start; ``shrink`` makes a program that fails small.

Values are small multiples of 1/4 and kept so: float results are exact but for what is stated at
``TOLERANCES``, so that comparisons and casts to integers give the same on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from xla_core.extension_api.operators import Operand
from xla_core.testing.program_parts.choices import is_float
from xla_core.testing.program_parts.families import FAMILIES, WEIGHTS
from xla_core.testing.program_parts.instructions import (
    FACTS,
    Instruction,
    Observation,
    Program,
    Raised,
)
from xla_core.testing.program_parts.machine import Machine
from xla_core.testing.program_parts.writer import ProgramWriter

# Sums of products are exact until gradients multiply many of them; from there on the order of
# summation shows. bfloat16 is rounded by PyTorch after every operation, by XLA when it is stored.
TOLERANCES: Final = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2.0**-6}

_DTYPES: Final = (
    (torch.float32,) * 5 + (torch.float64,) * 2 + (torch.int64,) * 2 + (torch.bool, torch.bfloat16)
)


def make_program(seed: int, length: int = 14) -> Program:
    """The program of ``seed``, with about ``length`` instructions in its loop."""
    return Generator(seed).program(length)


class Generator(ProgramWriter):
    """Makes one program by drawing instructions."""

    def program(self, length: int) -> Program:
        """Make the whole program."""
        for _ in range(self.random.randint(2, 4)):
            self.fresh(self.shape(), self.random.choice(_DTYPES))
        if self.random.random() < 0.6:
            self.emit(Instruction("leaf", (self.slot(is_float),), results=(self.new(),)))
        setup, self.instructions = tuple(self.instructions), []
        for _ in range(length):
            self.step()
        if self.random.random() < 0.5:
            self.emit(Instruction("observe_all"))
        elif self.random.random() < 0.6:
            self.emit(Instruction("sync"))
        return Program(self.seed, setup, tuple(self.instructions), self.random.choice((1, 2, 2, 3)))

    def step(self) -> None:
        """Add one instruction that PyTorch accepts; seldom, one that it refuses."""
        if not self.quiet and self.random.random() < 0.08:
            self.quiet = self.random.randint(1, 4)
        for _ in range(12):
            makers = self.random.choices(FAMILIES, WEIGHTS)[0]
            try:
                instruction = self.random.choice(makers)(self)
            except RuntimeError:  # it met a view that autograd has given up
                continue
            if instruction is not None and self.emit(instruction):
                break
        self.quiet = max(0, self.quiet - 1)


def difference(program: Program, device: torch.device, sync: Callable[[], None]) -> str | None:
    """How the run on ``device`` differs from the CPU's, or None if it does not."""
    expected = Machine(torch.device("cpu"), lambda: None)
    expected.run(program)
    got = Machine(device, sync)
    got.run(program, stop=expected.executed)
    return compare_logs(expected.log, got.log)


def compare_logs(expected: Sequence[Operand], got: Sequence[Operand]) -> str | None:
    """The first difference between two machines' logs, or None."""
    for number, (want, have) in enumerate(zip(expected, got, strict=False)):
        difference = _compare(want, have)
        if difference is not None:
            return f"log entry {number}: {difference}"
    if len(expected) != len(got):
        shorter, longer = sorted((expected, got), key=len)
        more = longer[len(shorter)]
        return f"{len(expected)} log entries on the CPU, {len(got)} on xla; then {more}"
    return None


def _compare(want: object, have: object) -> str | None:
    if isinstance(want, Observation) and isinstance(have, Observation):
        return _compare_observations(want, have)
    if isinstance(want, Raised) and isinstance(have, Raised):
        return None if want.kind == have.kind else f"CPU: {want}; xla: {have}"
    return None if want == have else f"CPU: {want}; xla: {have}"


def _compare_observations(want: Observation, have: Observation) -> str | None:
    if want.where != have.where:
        return f"CPU shows {want.where}, xla shows {have.where}"
    if want.facts != have.facts:
        return f"{want.where}: {FACTS}: CPU {want.facts}, xla {have.facts}"
    if want.value.shape != have.value.shape:
        return f"{want.where}: shape {tuple(want.value.shape)} on CPU, {tuple(have.value.shape)} on xla"
    if not _close(want.value, have.value):
        return f"{want.where}: CPU {want.value.tolist()}; xla {have.value.tolist()}"
    return None


def _close(want: torch.Tensor, have: torch.Tensor) -> bool:
    tolerance = TOLERANCES.get(want.dtype)
    if tolerance is None or not want.numel():
        return torch.equal(want, have)
    # relative to the largest element: small ones may be differences of large ones
    scale = max(1.0, want.abs().double().nan_to_num(posinf=0, neginf=0).max().item())
    return torch.allclose(
        want.double(), have.double(), rtol=tolerance, atol=tolerance * scale, equal_nan=True
    )


# -- shrinking -------------------------------------------------------------------------------------


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A program with fewer instructions and iterations that still ``fails``."""
    for iterations in range(1, program.iterations):
        shorter = Program(program.seed, program.setup, program.body, iterations)
        if fails(shorter):
            program = shorter
            break
    size = max(1, len(program.body) // 2)
    while size:
        for candidate in _without_chunks(program, size):
            if fails(candidate):
                program = candidate
                break
        else:
            size //= 2
    return program


def _without_chunks(program: Program, size: int) -> Iterator[Program]:
    setup, body = program.setup, program.body
    for start in range(0, len(body), size):
        rest = body[:start] + body[start + size :]
        yield Program(program.seed, setup, rest, program.iterations)
    for start in range(0, len(setup), size):
        rest = setup[:start] + setup[start + size :]
        yield Program(program.seed, rest, body, program.iterations)
