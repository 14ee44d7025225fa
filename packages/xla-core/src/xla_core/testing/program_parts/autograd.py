"""Instructions about gradients."""

from __future__ import annotations

from typing import Final

import torch

from xla_core.testing.program_parts.choices import (
    Maker,
    call,
    is_float,
)
from xla_core.testing.program_parts.instructions import Instruction
from xla_core.testing.program_parts.writer import ProgramWriter


def _leaf(g: ProgramWriter) -> Instruction:
    return call(g, "leaf", g.slot(is_float))


def _require(g: ProgramWriter) -> Instruction:
    return Instruction("requires_grad_", (g.slot(is_float),))


def _backward(g: ProgramWriter) -> Instruction | None:
    a = g.maybe(lambda t: t.requires_grad)
    b = g.maybe(lambda t: t.requires_grad)
    if a is None or b is None:
        return None
    weight = g.random.choice((1.0, 0.5, -2.0))
    return Instruction("run_backward", ([a, b], weight, g.random.random() < 0.5))


def _gradients(g: ProgramWriter) -> Instruction | None:
    a = g.maybe(lambda t: t.requires_grad and not t.is_leaf)
    b = g.maybe(lambda t: t.requires_grad)
    if a is None or b is None:
        return None
    return call(g, "gradients", a, [b])


def _grad(g: ProgramWriter) -> Instruction | None:
    a = g.maybe(lambda t: t.is_leaf and t.grad is not None)
    return call(g, "grad", a) if a else None


def _use_grad(g: ProgramWriter) -> Instruction | None:
    a = g.maybe(lambda t: t.is_leaf and t.grad is not None)
    if a is None:
        return None
    if g.random.random() < 0.3:
        return Instruction("clear_grad", (a,))
    rate = g.number(torch.zeros(()))
    return Instruction("descend", (a, rate), writes=(a.index,), grad=False)


GRADIENTS: Final[tuple[Maker, ...]] = (
    _leaf,
    _backward,
    _backward,
    _gradients,
    _grad,
    _use_grad,
    _require,
)
