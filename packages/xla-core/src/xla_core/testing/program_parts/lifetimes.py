"""Instructions that share, swap and drop tensors, observe them, and end steps."""

from __future__ import annotations

from typing import Final

import torch

from xla_core.testing.program_parts.choices import (
    Maker,
)
from xla_core.testing.program_parts.instructions import Instruction
from xla_core.testing.program_parts.writer import ProgramWriter


def _detach_self(g: ProgramWriter) -> Instruction:
    return Instruction("detach_", (g.slot(),))


def _set_data(g: ProgramWriter) -> Instruction | None:
    a = g.slot()
    t = g.tensor(a)
    b = g.maybe(lambda u: u.dtype == t.dtype and u is not t) or a
    # autograd makes the gradient of a view that was written to anew from the base, but by strides on the CPU
    if g.tensor(b).shape != t.shape and g.maybe(lambda u: u._base is t):
        return None
    return Instruction(g.random.choice(("set_data", "set_")), (a, b))


def _swap(g: ProgramWriter) -> Instruction | None:
    a = g.slot()
    b = g.maybe(lambda u: u is not g.tensor(a))
    return Instruction("swap", (a, b)) if b else None


def _resize(g: ProgramWriter) -> Instruction:
    """To fewer elements: what more elements would hold is not defined."""
    a = g.slot(lambda t: not t._is_view() and t.is_contiguous() and t.dim() > 0)
    shape = [g.random.randint(0, size) for size in g.tensor(a).shape]
    return Instruction("resize_", (a, shape))


def _rebind(g: ProgramWriter) -> Instruction | None:
    """Carry a value into the next iteration under an older name."""
    a = g.slot()
    t = g.tensor(a)
    b = g.maybe(lambda u: (u.shape, u.dtype, u.stride()) == (t.shape, t.dtype, t.stride()))
    return Instruction("rebind", (b,), results=(a.index,)) if b else None


def _drop(g: ProgramWriter) -> Instruction:
    return Instruction("drop", (g.slot().index,))


def _observe(g: ProgramWriter) -> Instruction:
    name = g.random.choice(("observe", "observe", "text", "read_item"))
    a = g.slot() if name != "read_item" else g.slot(lambda t: t.dtype != torch.bfloat16)
    return Instruction(name, (a, repr(a)) if name == "observe" else (a,))


def _sync(g: ProgramWriter) -> Instruction:
    return Instruction("sync")


def _garbage(g: ProgramWriter) -> Instruction:
    return Instruction(g.random.choice(("garbage", "capture")), (g.slot(),))


def _reshape_self(g: ProgramWriter) -> Instruction:
    name = g.random.choice(("t_", "transpose_", "squeeze_", "unsqueeze_"))
    a = g.slot(lambda t: t.dim() <= 2) if name == "t_" else g.slot()
    t = g.tensor(a)
    args = {"transpose_": (g.dim(t), g.dim(t)), "unsqueeze_": (0,)}.get(name, ())
    return Instruction(name, (a, *args), writes=(a.index,))


SHARED: Final[tuple[Maker, ...]] = (_detach_self, _set_data, _swap, _resize, _reshape_self)

NAMES: Final[tuple[Maker, ...]] = (_rebind, _drop, _garbage)

STEPS: Final[tuple[Maker, ...]] = (_observe, _sync)
