"""Which tensors an instruction may take, and how it is written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from xla_core.extension_api.operators import Operand
from xla_core.testing.program_parts.instructions import Instruction, Slot
from xla_core.testing.program_parts.writer import ProgramWriter

Maker = Callable[[ProgramWriter], Instruction | None]

EXACT: Final = (torch.float32, torch.float64)

LARGEST: Final = 200  # elements; larger tensors show nothing more


def is_float(t: torch.Tensor) -> bool:
    """Whether a tensor has a floating-point dtype."""
    return t.is_floating_point()


def is_exact(t: torch.Tensor) -> bool:
    """Whether sums and products of small values are exact in its dtype."""
    return t.dtype in EXACT


def is_number(t: torch.Tensor) -> bool:
    """Whether a tensor holds numbers, not truth values."""
    return t.dtype != torch.bool


def has_dims(t: torch.Tensor) -> bool:
    """Whether a tensor has a dimension."""
    return t.dim() > 0


def call(
    g: ProgramWriter, target: str, *args: Operand, count: int = 1, **kwargs: object
) -> Instruction:
    """A call of ``target`` whose ``count`` results go to new slots."""
    results = tuple(g.new() for _ in range(count))
    return Instruction(target, args, tuple(kwargs.items()), results)


def write(
    g: ProgramWriter, target: str, into: Slot, *args: Operand, **kwargs: object
) -> Instruction:
    """An in-place call; now and then its result gets a second name."""
    results = (g.new(),) if g.random.random() < 0.15 else ()
    if target == "__setitem__":
        results = ()
    return Instruction(target, (into, *args), tuple(kwargs.items()), results, (into.index,))


def mask_for(g: ProgramWriter, t: torch.Tensor) -> Slot:
    """A boolean tensor of the shape of ``t``."""
    slot = g.maybe(lambda u: u.dtype == torch.bool and u.shape == t.shape)
    return slot or g.fresh(t.shape, torch.bool)


def basic_index(g: ProgramWriter, t: torch.Tensor) -> tuple[object, ...]:
    """A basic index: slices with steps and negative ends, numbers, None, an ellipsis."""
    index: list[Operand] = []
    for size in t.shape[: g.random.randint(1, max(1, t.dim()))]:
        kind = g.random.random()
        if kind < 0.2 and size:
            index.append(g.random.randrange(-size, size))
        elif kind < 0.35:
            index.append(slice(None))
        else:
            start = g.random.choice((None, 0, 1, 2, -1, -2, -9))
            stop = g.random.choice((None, None, 1, 3, -1, 9))
            index.append(slice(start, stop, g.random.choice((None, None, 1, 2, 3))))
    if g.random.random() < 0.15:
        index.insert(g.random.randint(0, len(index)), None)
    if g.random.random() < 0.15:
        index.append(...)
    return tuple(index)
