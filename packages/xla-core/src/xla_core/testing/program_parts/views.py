"""Instructions that look at a tensor in another way."""

from __future__ import annotations

from typing import Final

from xla_core.testing.program_parts.choices import (
    LARGEST,
    Maker,
    basic_index,
    call,
    has_dims,
)
from xla_core.testing.program_parts.instructions import Instruction
from xla_core.testing.program_parts.writer import ProgramWriter


def _select(g: ProgramWriter) -> Instruction | None:
    a = g.slot(has_dims)
    dim = g.dim(g.tensor(a))
    size = g.tensor(a).shape[dim]
    return call(g, "select", a, dim, g.random.randrange(-size, size)) if size else None


def _slice(g: ProgramWriter) -> Instruction:
    a = g.slot(has_dims)
    return call(g, "__getitem__", a, basic_index(g, g.tensor(a)))


def _narrow(g: ProgramWriter) -> Instruction | None:
    a = g.slot(has_dims)
    dim = g.dim(g.tensor(a))
    size = g.tensor(a).shape[dim]
    start = g.random.randint(0, size)
    return call(g, "narrow", a, dim, start, g.random.randint(0, size - start))


def _view(g: ProgramWriter) -> Instruction:
    a = g.slot()
    shape = list(g.tensor(a).shape)
    g.random.shuffle(shape)
    if len(shape) >= 2 and g.random.random() < 0.5:
        last = shape.pop()
        shape[-1] *= last
    if g.random.random() < 0.3:
        shape.append(1)
    if shape and 0 not in shape and g.random.random() < 0.3:
        shape[g.random.randrange(len(shape))] = -1
    if g.random.random() < 0.5:
        return call(g, "view", a, shape)
    return call(g, "reshaped", a, "reshape", g.random.random() < 0.4, shape)


def _reorder(g: ProgramWriter) -> Instruction:
    a = g.slot()
    t = g.tensor(a)
    if g.random.random() < 0.4 or not t.dim():
        order = list(range(t.dim()))
        g.random.shuffle(order)
        return call(g, "permute", a, order)
    return call(g, g.random.choice(("transpose", "movedim")), a, g.dim(t), g.dim(t))


def _short_view(g: ProgramWriter) -> Instruction:
    name = g.random.choice(("t", "squeeze", "flatten", "contiguous", "detach", "data", "view_as"))
    a = g.slot(lambda t: t.dim() <= 2) if name == "t" else g.slot()
    if name in ("flatten", "contiguous"):
        return call(g, "reshaped", a, name, g.random.random() < 0.4)
    return call(g, name, a, *((a,) if name == "view_as" else ()))


def _squeeze(g: ProgramWriter) -> Instruction:
    a = g.slot()
    t = g.tensor(a)
    if g.random.random() < 0.5:
        return call(g, "unsqueeze", a, g.random.randint(-t.dim() - 1, t.dim()))
    return call(g, "squeeze", a, g.dim(t))


def _expand(g: ProgramWriter) -> Instruction | None:
    a = g.slot(lambda t: t.numel() <= 24)
    shape = [size if size != 1 else g.random.randint(1, 3) for size in g.tensor(a).shape]
    if g.random.random() < 0.5:
        shape.insert(0, g.random.randint(1, 3))
    return call(g, "expand", a, shape)


def _diagonal(g: ProgramWriter) -> Instruction:
    a = g.slot(lambda t: t.dim() >= 2)
    first, second = g.random.sample(range(g.tensor(a).dim()), 2)
    return call(g, "diagonal", a, g.random.randint(-2, 2), first, second)


def _unfold(g: ProgramWriter) -> Instruction | None:
    a = g.slot(has_dims)
    dim = g.dim(g.tensor(a))
    size = g.tensor(a).shape[dim]
    if size == 0 or g.tensor(a).numel() > LARGEST:
        return None
    return call(g, "unfold", a, dim, g.random.randint(1, size), g.random.randint(1, 3))


def _several(g: ProgramWriter) -> Instruction | None:
    a = g.slot(has_dims)
    dim = g.dim(g.tensor(a))
    size = g.tensor(a).shape[dim]
    name = g.random.choice(("split", "chunk", "unbind", "tensor_split"))
    if name == "unbind":
        return call(g, name, a, dim, count=min(size, 3)) if size else None
    return call(g, name, a, g.random.randint(1, 3), dim, count=2)


COMMON: Final[tuple[Maker, ...]] = (_select, _slice, _narrow, _view, _reorder, _short_view)

RARE: Final[tuple[Maker, ...]] = (_squeeze, _expand, _diagonal, _unfold, _several)
