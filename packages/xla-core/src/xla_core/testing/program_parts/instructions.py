"""What a random program consists of, what is observed of it, and where it stops being defined."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Final

import torch

from xla_core.extension_api.operators import Operand, Operands

FACTS: Final = "(dtype, requires_grad, leaf, writes, view, no grad_fn)"
"""The facts of an ``Observation``, in order."""


class UndefinedProgramError(Exception):
    """The next instruction has no defined result: it reads memory that it overwrites."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A reference to a tensor of the machine."""

    index: int

    def __repr__(self) -> str:
        return f"s{self.index}"


@dataclasses.dataclass(frozen=True, slots=True)
class Vary:
    """A number that is another one in every iteration of the program's loop."""

    values: tuple[float | int, ...]

    def __repr__(self) -> str:
        return f"vary{self.values}"


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One call: ``target`` is a method of the first argument, ``torch.f``, or a machine operation.

    ``results`` are the slots that take what it returns, ``writes`` those it writes to.
    """

    target: str
    args: Operands = ()
    kwargs: tuple[tuple[str, object], ...] = ()
    results: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    grad: bool = True

    def __str__(self) -> str:
        bound = ", ".join(f"s{i}" for i in self.results)
        words = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs)]
        text = f"{self.target}({', '.join(words)})"
        return ("" if self.grad else "no_grad: ") + (f"{bound} = {text}" if bound else text)


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """Instructions run once, then a body run ``iterations`` times on the same slots."""

    seed: int
    setup: tuple[Instruction, ...]
    body: tuple[Instruction, ...]
    iterations: int

    def __str__(self) -> str:
        lines = [f"seed {self.seed}", *map(str, self.setup), f"{self.iterations} times:"]
        return "\n".join([*lines, *(f"    {i}" for i in self.body)])


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """What can be seen of one tensor, with its value on the CPU."""

    where: str
    value: torch.Tensor
    facts: tuple[object, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Raised:
    """An exception: its type, which must be equal on all devices, and its text, which need not."""

    kind: str
    text: str


def numbers(seed: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Small values on a coarse grid: sums and products of a few of them are exact in every dtype."""
    source = random.Random(seed)
    count = int(torch.Size(shape).numel())
    if dtype == torch.bool:
        flat: list[Operand] = [source.random() < 0.5 for _ in range(count)]
    elif dtype in (torch.float32, torch.float64):
        flat = [source.randint(-12, 12) / 4 for _ in range(count)]
    else:
        flat = [source.randint(-5, 5) for _ in range(count)]
    return torch.tensor(flat, dtype=dtype).reshape(tuple(shape)).clone()
