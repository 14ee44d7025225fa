"""Instructions that write to tensors in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from xla_core.testing.program_parts.choices import (
    Maker,
    basic_index,
    has_dims,
    is_exact,
    is_float,
    mask_for,
    write,
)
from xla_core.testing.program_parts.instructions import Instruction, Slot
from xla_core.testing.program_parts.memory import same_memory
from xla_core.testing.program_parts.writer import ProgramWriter


def _add_in_place(g: ProgramWriter) -> Instruction:
    a = g.slot()
    t = g.tensor(a)
    name = g.random.choice(("add_", "sub_", "mul_", "copy_", "add_", "copy_", "__iadd__"))
    if t.dtype == torch.bfloat16 and name == "mul_":
        name = "add_"
    if t.dtype == torch.bool and name != "copy_":
        return write(g, g.random.choice(("logical_and_", "bitwise_xor_")), a, g.fitting(t))
    if name != "copy_" and g.random.random() < 0.4:
        return write(g, name, a, g.number(t))
    kwargs = {"alpha": g.number(t)} if name in ("add_", "sub_") and g.random.random() < 0.4 else {}
    return write(g, name, a, g.fitting(t), **kwargs)


def _copy_from_host(g: ProgramWriter) -> Instruction:
    a = g.slot()
    t = g.tensor(a)
    dtype = g.random.choice((t.dtype, torch.int64))
    shape = t.shape[g.random.randint(0, t.dim()) :]
    return write(g, "copy_host", a, f"{g.seed}/host{g.new()}", tuple(shape), dtype)


def _fill(g: ProgramWriter) -> Instruction:
    a = g.slot()
    t = g.tensor(a)
    name = g.random.choice(("fill_", "zero_", "fill_tensor", "neg_", "abs_", "clamp_"))
    if t.dtype == torch.bool and name in ("neg_", "abs_", "clamp_"):
        name = "zero_"
    if name == "fill_":
        return write(g, name, a, g.number(t))
    if name == "fill_tensor":
        return write(g, "fill_", a, g.fresh((), t.dtype))
    return write(g, name, a, *((-2, 3) if name == "clamp_" else ()))


def _masked(g: ProgramWriter) -> Instruction:
    a = g.slot()
    t = g.tensor(a)
    mask = mask_for(g, t)
    if g.random.random() < 0.5:
        return write(g, "masked_fill_", a, mask, g.number(t))
    return write(g, "__setitem__", a, mask, g.number(t))


def _masked_values(g: ProgramWriter) -> Instruction | None:
    """Values of every selected element: their number depends on the mask's values."""
    a = g.slot(lambda t: 0 < t.numel() < 20)
    mask = mask_for(g, g.tensor(a))
    values = g.new()
    g.emit(Instruction("__getitem__", (a, mask), results=(values,)))
    return write(g, "__setitem__", a, mask, Slot(values))


def _set_item(g: ProgramWriter) -> Instruction:
    a = g.slot()
    t = g.tensor(a)
    index = basic_index(g, t)
    if g.random.random() < 0.5:
        return write(g, "__setitem__", a, index, g.number(t))
    return write(g, "__setitem__", a, index, g.fresh(t[index].shape, t.dtype))


def _index_put(g: ProgramWriter) -> Instruction | None:
    a = g.slot(has_dims)
    t = g.tensor(a)
    count = min(t.shape[0], g.random.randint(1, 2))
    index = g.positions(t.shape[0], count)
    if index is None:
        return None
    values = g.fresh((count, *t.shape[1:]), t.dtype)
    if g.random.random() < 0.3:
        return write(g, "__setitem__", a, index, values)
    accumulate = t.dtype != torch.bool and g.random.random() < 0.5
    return write(g, "index_put_", a, (index,), values, accumulate=accumulate)


def _index_write(g: ProgramWriter) -> Instruction | None:
    a = g.slot(lambda t: t.dim() > 0 and t.dtype != torch.bool)
    t = g.tensor(a)
    dim = g.dim(t)
    index = g.positions(t.shape[dim], min(t.shape[dim], 2))
    if index is None:
        return None
    name = g.random.choice(("index_add_", "index_copy_", "index_fill_"))
    if name == "index_fill_":
        return write(g, name, a, dim, index, 2)
    shape = list(t.shape)
    shape[dim] = min(t.shape[dim], 2)
    return write(g, name, a, dim, index, g.fresh(shape, t.dtype))


def _fused(g: ProgramWriter) -> Instruction:
    a = g.slot(is_exact)
    t = g.tensor(a)
    return write(g, "addcmul_", a, g.fitting(t), g.fitting(t), value=g.number(t))


def _foreach(g: ProgramWriter) -> Instruction | None:
    a = g.slot(is_exact)
    t = g.tensor(a)
    b = g.maybe(lambda u: u.dtype == t.dtype and u is not t and not same_memory(u, t))
    if b is None:
        return None
    name = g.random.choice(("torch._foreach_add_", "torch._foreach_mul_"))
    return Instruction(name, ([a, b], g.number(t)), writes=(a.index, b.index))


def _out(g: ProgramWriter) -> Instruction:
    a = g.slot(is_exact)
    t = g.tensor(a)
    out = g.maybe(lambda u: u.shape == t.shape and is_float(u)) or g.fresh(t.shape, torch.float32)
    name = g.random.choice(("torch.add", "torch.sub", "torch.mul", "torch.neg", "torch.cumsum"))
    if name == "torch.cumsum":
        rest: Sequence[object] = (g.dim(t),)
    else:
        rest = () if name == "torch.neg" else (g.fitting(t),)
    return Instruction(name, (a, *rest), (("out", out),), writes=(out.index,))


COMMON: Final[tuple[Maker, ...]] = (_add_in_place, _add_in_place, _fill, _set_item)

RARE: Final[tuple[Maker, ...]] = (
    _copy_from_host,
    _masked,
    _masked_values,
    _index_put,
    _index_write,
    _fused,
    _foreach,
    _out,
)
