"""Random programs with one or two varying dimensions, and how ``xla`` differs from the CPU on them.

A program is made from a seed while the CPU runs it for two sets of lengths, and is lines that can be run again for
any: so the same operations are recorded for each. ``differences`` runs it for several lengths on ``xla``: enough of
them for a fit, then more, then one that is a trap (nothing, one, equal by chance, far beyond the bound).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple
from unittest import mock

import numpy as np
import torch

import torch_xla
from xla_core.compilation import build_program
from xla_core.contract.device_protocol import Buffer
from xla_core.extension_api.operators import Operand
from xla_core.support import counters
from xla_core.testing.against_cpu import forget_pending
from xla_core.testing.lengths import operations
from xla_core.varying import families
from xla_core.varying.bound_program import VaryingExecutable

Lengths = tuple[int, ...]

# Lengths that programs are made with; operations that either refuses are not used.
_MADE_WITH: Final = ((7, 5), (11, 9))
_ONE: Final = ((7,), (11,), (9,), (13,), (6,))
_TWO: Final = ((7, 5), (11, 9), (9, 12), (6, 8), (13, 6), (10, 11), (8, 7))
_TRAPS: Final = ((0,), (1,), (2,), (3,), (4,), (40,), (5,))
_TWO_TRAPS: Final = ((0, 6), (6, 1), (9, 9), (8, 4), (3, 10), (30, 7), (6, 40), (2, 2))
LIMITS: Final = "16,64"
"""What ``XLA_VARYING_LIMITS`` may be so that few programs are compiled: one for all lengths but a trap."""
_MOST_ELEMENTS: Final = 2000
_LARGE: Final = 50.0
# Sums are associated otherwise, and what follows may enlarge the difference.
TOLERANCES: Final = {torch.float32: 2e-3, torch.float64: 1e-7}


class Line(NamedTuple):
    """One operation: its name, the numbers of its operands among the values, and the seed of its choices."""

    name: str
    operands: tuple[int, ...]
    seed: int


class Program(NamedTuple):
    """``shapes`` are those of the inputs: numbers, and "L" and "M" for lengths."""

    seed: int
    shapes: tuple[tuple[int | str, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    lines: tuple[Line, ...]
    results: tuple[int, ...]
    backward: bool

    def inputs(self, lengths: Lengths) -> list[torch.Tensor]:
        """Operands for these lengths, on the CPU."""
        draw = torch.Generator().manual_seed(self.seed + sum(lengths))
        sizes_of: dict[int | str, int | str] = {"L": lengths[0], "M": lengths[-1]}
        tensors = []
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            sizes = [sizes_of.get(size, size) for size in shape]
            values = torch.randn(sizes, generator=draw, dtype=torch.float64)
            tensors.append(
                (values * 3).to(dtype) if not dtype.is_floating_point else values.to(dtype)
            )
        return tensors

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results, and if ``backward`` the gradients by all floating-point inputs that have one."""
        leaves = [x.detach().clone() for x in inputs]
        if self.backward:
            leaves = [x.requires_grad_(x.is_floating_point()) for x in leaves]
        values: list[Operand] = list(leaves)
        for line in self.lines:
            values.append(
                operations.apply(line.name, line.seed, [values[i] for i in line.operands])
            )
        results = [values[i] for i in self.results]
        if not self.backward:
            return results
        total = sum((r.sum() for r in results if r.requires_grad), start=torch.zeros(()))
        wanted = [x for x in leaves if x.requires_grad]
        if isinstance(total, torch.Tensor) and total.requires_grad:
            gradients = torch.autograd.grad(total, wanted, allow_unused=True)
            results += [g for g in gradients if g is not None]
        return [r.detach() for r in results]

    def assignments(self) -> list[Lengths]:
        """The lengths that it is run with: some to fit, some to serve, and a trap."""
        draw = random.Random(self.seed)
        two = any("M" in shape for shape in self.shapes)
        plain, traps = (_TWO, _TWO_TRAPS) if two else (_ONE, _TRAPS)
        return [*plain, draw.choice(traps)]


def make_program(seed: int) -> Program:
    """The program of ``seed``."""
    draw = random.Random(seed)
    two = draw.random() < 0.35
    exact = draw.random() < 0.75
    count = draw.randint(1, 3)
    shapes = [_shape(draw, two) for _ in range(count)]
    if not any("L" in shape for shape in shapes):
        shapes[0] = ("L", *shapes[0][1:])
    if two and not any("M" in shape for shape in shapes):
        shapes.append(("M", draw.choice((2, 3, 4))))
    main = torch.float64 if exact else torch.float32
    dtypes = [main if i == 0 or draw.random() < 0.8 else torch.int64 for i in range(len(shapes))]
    program = Program(seed, tuple(shapes), tuple(dtypes), (), (), False)
    return _Writer(program, draw, exact).program()


def _shape(draw: random.Random, two: bool) -> tuple[int | str, ...]:
    sizes = ("L", "L", "L", 1, 2, 3, 4, *(("M", "M") if two else ()))
    rank = draw.choice((1, 2, 2, 3, 3))
    return tuple(draw.choice(sizes) for _ in range(rank))


# Operations that jump, or that enlarge errors: in float32 their operands are inputs only.
_SHARP: Final = frozenset(
    name
    for name, function in {**operations.UNARY, **operations.BINARY}.items()
    if {"_whole", "_index"} & set(function.__code__.co_names)
)


class _Writer:
    """Makes one program: draws operations, and keeps those that both sets of lengths can run."""

    def __init__(self, program: Program, draw: random.Random, exact: bool) -> None:
        self.start = program
        self.draw = draw
        self.exact = exact
        two = any("M" in shape for shape in program.shapes)
        made_with = _MADE_WITH if two else [(n,) for n, _ in _MADE_WITH]
        self.values = [program.inputs(lengths) for lengths in made_with]
        self.lines: list[Line] = []

    def program(self) -> Program:
        """Make the whole program."""
        for _ in range(self.draw.randint(3, 8)):
            self.step()
        count = len(self.values[0])
        results = {count - 1, *self.draw.choices(range(len(self.start.shapes), count), k=1)}
        return self.start._replace(
            lines=tuple(self.lines),
            results=tuple(sorted(results)),
            backward=self.draw.random() < 0.4,
        )

    def step(self) -> None:
        """Add one operation."""
        for _ in range(60):
            table = operations.BINARY if self.draw.random() < 0.3 else operations.UNARY
            name = self.draw.choice(list(table))
            count = 1 if table is operations.UNARY else 2
            latest = len(self.values[0]) - 1
            operands = tuple(
                latest if self.draw.random() < 0.4 else self.draw.randint(0, latest)
                for _ in range(count)
            )
            inputs_only = max(operands) < len(self.start.shapes)
            if not self.exact and name in _SHARP and not inputs_only:
                continue
            if self.add(Line(name, operands, self.draw.randrange(1 << 30))):
                return

    def add(self, line: Line) -> bool:
        """Add a line if it works, and one that makes large values small again."""
        try:
            results = [
                operations.apply(line.name, line.seed, [values[i] for i in line.operands])
                for values in self.values
            ]
        except (RuntimeError, IndexError, ValueError, TypeError):
            return False
        if any(not 0 < m.numel() <= _MOST_ELEMENTS or m.dim() > 5 for m in results):
            return False
        if any(m.is_floating_point() and not m.isfinite().all() for m in results):
            return False
        for values, value in zip(self.values, results, strict=True):
            values.append(value)
        self.lines.append(line)
        large = any(bool(m.abs().amax() > _LARGE) for m in results if m.dtype != torch.bool)
        if large and results[0].is_floating_point():
            self.add(Line("sin", (len(self.values[0]) - 1,), line.seed))
        return True


class NotServedError(BaseException):
    """A step would be compiled for its own sizes; what ends a step otherwise, as Ctrl-C does, it ends, too."""


def _not_served(*_: object) -> object:
    raise NotServedError


@contextlib.contextmanager
def only_served() -> Iterator[None]:
    """Within the block steps that no program for a bound serves are not run: they are compared elsewhere.

    That takes a third of the time.
    """
    with mock.patch.object(build_program, "build", _not_served):
        yield


class Outcome(NamedTuple):
    """What came of one program: the first difference if there is one, and how many steps were served."""

    difference: str | None
    served: int


def outcome(program: Program, assignments: Sequence[Lengths] | None = None) -> Outcome:
    """Run a program for several lengths on ``xla`` and on the CPU."""
    before = counters.all_counters().get(families.SERVED, 0)
    difference = None
    for lengths in program.assignments() if assignments is None else assignments:
        mismatch = _difference(program, lengths)
        if mismatch is not None:
            difference = f"lengths {lengths}: {mismatch}"
            break
    return Outcome(difference, counters.all_counters().get(families.SERVED, 0) - before)


def _difference(program: Program, lengths: Lengths) -> str | None:
    inputs = program.inputs(lengths)
    expected, refused = _attempt(program, inputs, "cpu")
    got, error = _attempt(program, inputs, "xla")
    forget_pending()
    if refused is not None or isinstance(error, NotServedError):
        return None  # an index out of range, which only the CPU refuses, or nothing to compare
    if error is not None:
        return repr(error)
    for number, (g, e) in enumerate(zip(got, expected, strict=True)):
        near = TOLERANCES.get(e.dtype, 0)
        try:
            torch.testing.assert_close(g, e, rtol=near, atol=near, equal_nan=True)
        except AssertionError as told:
            return f"result {number}: {told}"
    return None


def _attempt(
    program: Program, inputs: Sequence[torch.Tensor], device: str
) -> tuple[list[torch.Tensor], BaseException | None]:
    try:
        results = program.run([x.to(device) for x in inputs])
        if device != "cpu":
            torch_xla.sync()
        return [r.cpu() for r in results], None
    except (Exception, NotServedError) as error:
        return [], error


def smaller(program: Program) -> Program:
    """The program with one result and the lines that it needs, which still differs; itself where none does."""
    first = len(program.shapes)
    for backward in dict.fromkeys((False, program.backward)):
        for result in range(first, first + len(program.lines)):
            small = without_unused(program._replace(results=(result,), backward=backward))
            if outcome(small).difference is not None:
                return small
    return program


def without_unused(program: Program) -> Program:
    """The program without the lines that no result needs."""
    first = len(program.shapes)
    needed = set(program.results)
    for number in range(first + len(program.lines) - 1, first - 1, -1):
        if number in needed:
            needed.update(program.lines[number - first].operands)
    kept = [n for n in range(first, first + len(program.lines)) if n in needed]
    numbers = {n: i for i, n in enumerate([*range(first), *kept])}
    lines = [program.lines[n - first] for n in kept]
    return program._replace(
        lines=tuple(
            line._replace(operands=tuple(numbers[i] for i in line.operands)) for line in lines
        ),
        results=tuple(numbers[n] for n in program.results),
    )


def _junk(dtype: np.dtype) -> object:
    if dtype == np.bool_:
        return True
    return np.nan if np.issubdtype(dtype, np.inexact) else np.iinfo(dtype).max // 3


def _padded_with_junk(self: VaryingExecutable, buffer: Buffer, shape: tuple[int, ...]) -> object:
    array = self._on_host(buffer)
    whole = np.full(shape, _junk(array.dtype), array.dtype)
    whole[tuple(map(slice, array.shape))] = array
    return self._client.put(whole, self._placement)


@contextlib.contextmanager
def junk_as_padding() -> Iterator[None]:
    """Within the block padding is NaN, or a number that is no index: whatever reads it shows."""
    with mock.patch.object(VaryingExecutable, "_padded", _padded_with_junk):
        yield
