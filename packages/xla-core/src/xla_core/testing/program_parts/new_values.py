"""Instructions that compute new tensors."""

from __future__ import annotations

from typing import Final

import torch

from xla_core.testing.program_parts.choices import (
    EXACT,
    Maker,
    call,
    has_dims,
    is_exact,
    is_number,
    mask_for,
)
from xla_core.testing.program_parts.instructions import Instruction
from xla_core.testing.program_parts.writer import ProgramWriter


def _input(g: ProgramWriter) -> Instruction:
    index = g.new()
    dtype = g.random.choice((torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16))
    return Instruction("input", (f"{g.seed}/{index}", g.shape(), dtype), results=(index,))


def _unary(g: ProgramWriter) -> Instruction:
    name = g.random.choice(("neg", "abs", "relu", "sign", "floor", "clone", "square", "tame"))
    return call(g, name, g.slot(is_number if name != "square" else is_exact))


def _tanh(g: ProgramWriter) -> Instruction:
    return call(g, "quantized_tanh", g.slot(is_exact))


def _binary(g: ProgramWriter) -> Instruction:
    a = g.slot(is_exact)
    name = g.random.choice(("torch.add", "torch.sub", "torch.mul", "torch.maximum"))
    kwargs = {}
    if name in ("torch.add", "torch.sub") and g.random.random() < 0.5:
        kwargs["alpha"] = g.number(g.tensor(a))
    return call(g, name, a, g.fitting(g.tensor(a)), **kwargs)


def _scalar_binary(g: ProgramWriter) -> Instruction:
    a = g.slot(is_number)
    name = g.random.choice(("__add__", "__mul__", "__sub__", "__radd__", "__rsub__"))
    return call(g, name, a, g.number(g.tensor(a)))


def _integer_binary(g: ProgramWriter) -> Instruction:
    a = g.slot(lambda t: t.dtype == torch.int64, torch.int64)
    name = g.random.choice(("__add__", "__mul__", "__sub__", "__and__", "__xor__"))
    return call(g, name, a, g.fitting(g.tensor(a)))


def _comparison(g: ProgramWriter) -> Instruction:
    a = g.slot(lambda t: t.dtype != torch.bfloat16)
    name = g.random.choice(("eq", "ne", "lt", "ge"))
    other: object = g.fitting(g.tensor(a)) if g.random.random() < 0.5 else g.number(g.tensor(a))
    return call(g, name, a, other)


def _logical(g: ProgramWriter) -> Instruction:
    a = g.slot(lambda t: t.dtype == torch.bool, torch.bool)
    name = g.random.choice(("logical_and", "logical_or", "__xor__", "logical_not"))
    return call(g, name, a, *(() if name == "logical_not" else (g.fitting(g.tensor(a)),)))


def _where(g: ProgramWriter) -> Instruction:
    a = g.slot(is_number)
    mask = mask_for(g, g.tensor(a))
    return call(g, "torch.where", mask, a, g.fitting(g.tensor(a)))


def _join(g: ProgramWriter) -> Instruction:
    a = g.slot(has_dims)
    t = g.tensor(a)
    b = g.maybe(lambda u: u.shape == t.shape and u.dtype == t.dtype)
    name = g.random.choice(("torch.cat", "torch.stack"))
    return call(g, name, [a, b or a], g.dim(t))


def _reduction(g: ProgramWriter) -> Instruction | None:
    a = g.slot(lambda t: t.dim() > 0 and t.dtype != torch.bfloat16)
    t = g.tensor(a)
    dim = g.dim(t)
    if t.shape[dim] == 0 or t.dtype == torch.bool:
        return call(g, "sum", a, dim)
    return call(g, g.random.choice(("sum", "amax", "cumsum", "argmax", "flip")), a, dim)


def _matmul(g: ProgramWriter) -> Instruction:
    a = g.slot(lambda t: t.dtype in EXACT and t.dim() >= 2)
    t = g.tensor(a)
    b = g.fresh((t.shape[-1], g.random.randint(1, 3)), t.dtype)
    return call(g, "matmul", a, b)


def _gather(g: ProgramWriter) -> Instruction | None:
    a = g.slot(has_dims)
    dim = g.dim(g.tensor(a))
    size = g.tensor(a).shape[dim]
    index = g.positions(size, min(size, g.random.randint(1, 3)))
    return call(g, "index_select", a, dim, index) if index else None


def _advanced(g: ProgramWriter) -> Instruction | None:
    a = g.slot(has_dims)
    size = g.tensor(a).shape[0]
    index = g.positions(size, min(size, 2))
    return call(g, "__getitem__", a, index) if index else None


def _cast(g: ProgramWriter) -> Instruction:
    dtype = g.random.choice((torch.float32, torch.float64, torch.int64, torch.bfloat16))
    # bfloat16 would round fractions: they stay on a coarser grid
    a = (
        g.slot(is_exact)
        if dtype != torch.bfloat16
        else g.slot(lambda t: t.dtype == torch.int64, torch.int64)
    )
    return call(g, "cast", a, dtype)


def _constant(g: ProgramWriter) -> Instruction:
    a = g.slot()
    name = g.random.choice(("torch.zeros_like", "torch.ones_like", "new_zeros", "new_full"))
    if name == "new_zeros":
        return call(g, name, a, g.shape())
    if name == "new_full":
        return call(g, name, a, g.shape(), g.number(g.tensor(a)))
    return call(g, name, a)


NEW: Final[tuple[Maker, ...]] = (
    _input,
    _unary,
    _tanh,
    _binary,
    _scalar_binary,
    _integer_binary,
    _comparison,
    _logical,
)

COMBINED: Final[tuple[Maker, ...]] = (
    _where,
    _join,
    _reduction,
    _matmul,
    _gather,
    _advanced,
    _cast,
    _constant,
)
