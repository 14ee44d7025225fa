"""What a random program may consist of: functions that make one instruction for a generator.

Each looks at the tensors that are there and returns an instruction that suits one of them, or
None. ``FAMILIES`` groups them, ``WEIGHTS`` says how often each group is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from xla_core.extension_api.operators import Operand
from xla_core.testing.program_machine import Instruction, Slot
from xla_core.testing.program_writer import ProgramWriter

Maker = Callable[[ProgramWriter], Instruction | None]

EXACT: Final = (torch.float32, torch.float64)
_LIMIT: Final = 200  # elements; larger tensors show nothing more


def is_float(t: torch.Tensor) -> bool:
    """Whether a tensor has a floating-point dtype."""
    return t.is_floating_point()


def _is_exact(t: torch.Tensor) -> bool:
    return t.dtype in EXACT


def _is_number(t: torch.Tensor) -> bool:
    return t.dtype != torch.bool


def _has_dims(t: torch.Tensor) -> bool:
    return t.dim() > 0


def _call(
    g: ProgramWriter, target: str, *args: Operand, count: int = 1, **kwargs: object
) -> Instruction:
    results = tuple(g.new() for _ in range(count))
    return Instruction(target, args, tuple(kwargs.items()), results)


def _write(
    g: ProgramWriter, target: str, into: Slot, *args: Operand, **kwargs: object
) -> Instruction:
    """An in-place call; now and then its result gets a second name."""
    results = (g.new(),) if g.random.random() < 0.15 else ()
    if target == "__setitem__":
        results = ()
    return Instruction(target, (into, *args), tuple(kwargs.items()), results, (into.index,))


# -- new tensors -----------------------------------------------------------------------------------


def _input(g: ProgramWriter) -> Instruction:
    index = g.new()
    dtype = g.random.choice((torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16))
    return Instruction("input", (f"{g.seed}/{index}", g.shape(), dtype), results=(index,))


def _unary(g: ProgramWriter) -> Instruction:
    name = g.random.choice(("neg", "abs", "relu", "sign", "floor", "clone", "square", "tame"))
    return _call(g, name, g.slot(_is_number if name != "square" else _is_exact))


def _tanh(g: ProgramWriter) -> Instruction:
    return _call(g, "quantized_tanh", g.slot(_is_exact))


def _binary(g: ProgramWriter) -> Instruction:
    a = g.slot(_is_exact)
    name = g.random.choice(("torch.add", "torch.sub", "torch.mul", "torch.maximum"))
    kwargs = {}
    if name in ("torch.add", "torch.sub") and g.random.random() < 0.5:
        kwargs["alpha"] = g.number(g.tensor(a))
    return _call(g, name, a, g.fitting(g.tensor(a)), **kwargs)


def _scalar_binary(g: ProgramWriter) -> Instruction:
    a = g.slot(_is_number)
    name = g.random.choice(("__add__", "__mul__", "__sub__", "__radd__", "__rsub__"))
    return _call(g, name, a, g.number(g.tensor(a)))


def _integer_binary(g: ProgramWriter) -> Instruction:
    a = g.slot(lambda t: t.dtype == torch.int64, torch.int64)
    name = g.random.choice(("__add__", "__mul__", "__sub__", "__and__", "__xor__"))
    return _call(g, name, a, g.fitting(g.tensor(a)))


def _comparison(g: ProgramWriter) -> Instruction:
    a = g.slot(lambda t: t.dtype != torch.bfloat16)
    name = g.random.choice(("eq", "ne", "lt", "ge"))
    other: object = g.fitting(g.tensor(a)) if g.random.random() < 0.5 else g.number(g.tensor(a))
    return _call(g, name, a, other)


def _logical(g: ProgramWriter) -> Instruction:
    a = g.slot(lambda t: t.dtype == torch.bool, torch.bool)
    name = g.random.choice(("logical_and", "logical_or", "__xor__", "logical_not"))
    return _call(g, name, a, *(() if name == "logical_not" else (g.fitting(g.tensor(a)),)))


def _where(g: ProgramWriter) -> Instruction:
    a = g.slot(_is_number)
    mask = _mask_for(g, g.tensor(a))
    return _call(g, "torch.where", mask, a, g.fitting(g.tensor(a)))


def _mask_for(g: ProgramWriter, t: torch.Tensor) -> Slot:
    slot = g.maybe(lambda u: u.dtype == torch.bool and u.shape == t.shape)
    return slot or g.fresh(t.shape, torch.bool)


def _join(g: ProgramWriter) -> Instruction:
    a = g.slot(_has_dims)
    t = g.tensor(a)
    b = g.maybe(lambda u: u.shape == t.shape and u.dtype == t.dtype)
    name = g.random.choice(("torch.cat", "torch.stack"))
    return _call(g, name, [a, b or a], g.dim(t))


def _reduction(g: ProgramWriter) -> Instruction | None:
    a = g.slot(lambda t: t.dim() > 0 and t.dtype != torch.bfloat16)
    t = g.tensor(a)
    dim = g.dim(t)
    if t.shape[dim] == 0 or t.dtype == torch.bool:
        return _call(g, "sum", a, dim)
    return _call(g, g.random.choice(("sum", "amax", "cumsum", "argmax", "flip")), a, dim)


def _matmul(g: ProgramWriter) -> Instruction:
    a = g.slot(lambda t: t.dtype in EXACT and t.dim() >= 2)
    t = g.tensor(a)
    b = g.fresh((t.shape[-1], g.random.randint(1, 3)), t.dtype)
    return _call(g, "matmul", a, b)


def _gather(g: ProgramWriter) -> Instruction | None:
    a = g.slot(_has_dims)
    dim = g.dim(g.tensor(a))
    size = g.tensor(a).shape[dim]
    index = g.positions(size, min(size, g.random.randint(1, 3)))
    return _call(g, "index_select", a, dim, index) if index else None


def _advanced(g: ProgramWriter) -> Instruction | None:
    a = g.slot(_has_dims)
    size = g.tensor(a).shape[0]
    index = g.positions(size, min(size, 2))
    return _call(g, "__getitem__", a, index) if index else None


def _cast(g: ProgramWriter) -> Instruction:
    dtype = g.random.choice((torch.float32, torch.float64, torch.int64, torch.bfloat16))
    # bfloat16 would round fractions: they stay on a coarser grid
    a = (
        g.slot(_is_exact)
        if dtype != torch.bfloat16
        else g.slot(lambda t: t.dtype == torch.int64, torch.int64)
    )
    return _call(g, "cast", a, dtype)


def _constant(g: ProgramWriter) -> Instruction:
    a = g.slot()
    name = g.random.choice(("torch.zeros_like", "torch.ones_like", "new_zeros", "new_full"))
    if name == "new_zeros":
        return _call(g, name, a, g.shape())
    if name == "new_full":
        return _call(g, name, a, g.shape(), g.number(g.tensor(a)))
    return _call(g, name, a)


# -- views -----------------------------------------------------------------------------------------


def _select(g: ProgramWriter) -> Instruction | None:
    a = g.slot(_has_dims)
    dim = g.dim(g.tensor(a))
    size = g.tensor(a).shape[dim]
    return _call(g, "select", a, dim, g.random.randrange(-size, size)) if size else None


def _slice(g: ProgramWriter) -> Instruction:
    a = g.slot(_has_dims)
    return _call(g, "__getitem__", a, _index(g, g.tensor(a)))


def _index(g: ProgramWriter, t: torch.Tensor) -> tuple[object, ...]:
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


def _narrow(g: ProgramWriter) -> Instruction | None:
    a = g.slot(_has_dims)
    dim = g.dim(g.tensor(a))
    size = g.tensor(a).shape[dim]
    start = g.random.randint(0, size)
    return _call(g, "narrow", a, dim, start, g.random.randint(0, size - start))


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
        return _call(g, "view", a, shape)
    return _call(g, "reshaped", a, "reshape", g.random.random() < 0.4, shape)


def _reorder(g: ProgramWriter) -> Instruction:
    a = g.slot()
    t = g.tensor(a)
    if g.random.random() < 0.4 or not t.dim():
        order = list(range(t.dim()))
        g.random.shuffle(order)
        return _call(g, "permute", a, order)
    return _call(g, g.random.choice(("transpose", "movedim")), a, g.dim(t), g.dim(t))


def _short_view(g: ProgramWriter) -> Instruction:
    name = g.random.choice(("t", "squeeze", "flatten", "contiguous", "detach", "data", "view_as"))
    a = g.slot(lambda t: t.dim() <= 2) if name == "t" else g.slot()
    if name in ("flatten", "contiguous"):
        return _call(g, "reshaped", a, name, g.random.random() < 0.4)
    return _call(g, name, a, *((a,) if name == "view_as" else ()))


def _squeeze(g: ProgramWriter) -> Instruction:
    a = g.slot()
    t = g.tensor(a)
    if g.random.random() < 0.5:
        return _call(g, "unsqueeze", a, g.random.randint(-t.dim() - 1, t.dim()))
    return _call(g, "squeeze", a, g.dim(t))


def _expand(g: ProgramWriter) -> Instruction | None:
    a = g.slot(lambda t: t.numel() <= 24)
    shape = [size if size != 1 else g.random.randint(1, 3) for size in g.tensor(a).shape]
    if g.random.random() < 0.5:
        shape.insert(0, g.random.randint(1, 3))
    return _call(g, "expand", a, shape)


def _diagonal(g: ProgramWriter) -> Instruction:
    a = g.slot(lambda t: t.dim() >= 2)
    first, second = g.random.sample(range(g.tensor(a).dim()), 2)
    return _call(g, "diagonal", a, g.random.randint(-2, 2), first, second)


def _unfold(g: ProgramWriter) -> Instruction | None:
    a = g.slot(_has_dims)
    dim = g.dim(g.tensor(a))
    size = g.tensor(a).shape[dim]
    if size == 0 or g.tensor(a).numel() > _LIMIT:
        return None
    return _call(g, "unfold", a, dim, g.random.randint(1, size), g.random.randint(1, 3))


def _several(g: ProgramWriter) -> Instruction | None:
    a = g.slot(_has_dims)
    dim = g.dim(g.tensor(a))
    size = g.tensor(a).shape[dim]
    name = g.random.choice(("split", "chunk", "unbind", "tensor_split"))
    if name == "unbind":
        return _call(g, name, a, dim, count=min(size, 3)) if size else None
    return _call(g, name, a, g.random.randint(1, 3), dim, count=2)


# -- writes ----------------------------------------------------------------------------------------


def _add_in_place(g: ProgramWriter) -> Instruction:
    a = g.slot()
    t = g.tensor(a)
    name = g.random.choice(("add_", "sub_", "mul_", "copy_", "add_", "copy_", "__iadd__"))
    if t.dtype == torch.bfloat16 and name == "mul_":
        name = "add_"
    if t.dtype == torch.bool and name != "copy_":
        return _write(g, g.random.choice(("logical_and_", "bitwise_xor_")), a, g.fitting(t))
    if name != "copy_" and g.random.random() < 0.4:
        return _write(g, name, a, g.number(t))
    kwargs = {"alpha": g.number(t)} if name in ("add_", "sub_") and g.random.random() < 0.4 else {}
    return _write(g, name, a, g.fitting(t), **kwargs)


def _copy_from_host(g: ProgramWriter) -> Instruction:
    a = g.slot()
    t = g.tensor(a)
    dtype = g.random.choice((t.dtype, torch.int64))
    shape = t.shape[g.random.randint(0, t.dim()) :]
    return _write(g, "copy_host", a, f"{g.seed}/host{g.new()}", tuple(shape), dtype)


def _fill(g: ProgramWriter) -> Instruction:
    a = g.slot()
    t = g.tensor(a)
    name = g.random.choice(("fill_", "zero_", "fill_tensor", "neg_", "abs_", "clamp_"))
    if t.dtype == torch.bool and name in ("neg_", "abs_", "clamp_"):
        name = "zero_"
    if name == "fill_":
        return _write(g, name, a, g.number(t))
    if name == "fill_tensor":
        return _write(g, "fill_", a, g.fresh((), t.dtype))
    return _write(g, name, a, *((-2, 3) if name == "clamp_" else ()))


def _masked(g: ProgramWriter) -> Instruction:
    a = g.slot()
    t = g.tensor(a)
    mask = _mask_for(g, t)
    if g.random.random() < 0.5:
        return _write(g, "masked_fill_", a, mask, g.number(t))
    return _write(g, "__setitem__", a, mask, g.number(t))


def _masked_values(g: ProgramWriter) -> Instruction | None:
    """Values of every selected element: their number depends on the mask's values."""
    a = g.slot(lambda t: 0 < t.numel() < 20)
    mask = _mask_for(g, g.tensor(a))
    values = g.new()
    g.emit(Instruction("__getitem__", (a, mask), results=(values,)))
    return _write(g, "__setitem__", a, mask, Slot(values))


def _set_item(g: ProgramWriter) -> Instruction:
    a = g.slot()
    t = g.tensor(a)
    index = _index(g, t)
    if g.random.random() < 0.5:
        return _write(g, "__setitem__", a, index, g.number(t))
    return _write(g, "__setitem__", a, index, g.fresh(t[index].shape, t.dtype))


def _index_put(g: ProgramWriter) -> Instruction | None:
    a = g.slot(_has_dims)
    t = g.tensor(a)
    count = min(t.shape[0], g.random.randint(1, 2))
    index = g.positions(t.shape[0], count)
    if index is None:
        return None
    values = g.fresh((count, *t.shape[1:]), t.dtype)
    if g.random.random() < 0.3:
        return _write(g, "__setitem__", a, index, values)
    accumulate = t.dtype != torch.bool and g.random.random() < 0.5
    return _write(g, "index_put_", a, (index,), values, accumulate=accumulate)


def _index_write(g: ProgramWriter) -> Instruction | None:
    a = g.slot(lambda t: t.dim() > 0 and t.dtype != torch.bool)
    t = g.tensor(a)
    dim = g.dim(t)
    index = g.positions(t.shape[dim], min(t.shape[dim], 2))
    if index is None:
        return None
    name = g.random.choice(("index_add_", "index_copy_", "index_fill_"))
    if name == "index_fill_":
        return _write(g, name, a, dim, index, 2)
    shape = list(t.shape)
    shape[dim] = min(t.shape[dim], 2)
    return _write(g, name, a, dim, index, g.fresh(shape, t.dtype))


def _fused(g: ProgramWriter) -> Instruction:
    a = g.slot(_is_exact)
    t = g.tensor(a)
    return _write(g, "addcmul_", a, g.fitting(t), g.fitting(t), value=g.number(t))


def _foreach(g: ProgramWriter) -> Instruction | None:
    a = g.slot(_is_exact)
    t = g.tensor(a)
    b = g.maybe(lambda u: u.dtype == t.dtype and u is not t and not _same_memory(u, t))
    if b is None:
        return None
    name = g.random.choice(("torch._foreach_add_", "torch._foreach_mul_"))
    return Instruction(name, ([a, b], g.number(t)), writes=(a.index, b.index))


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _out(g: ProgramWriter) -> Instruction:
    a = g.slot(_is_exact)
    t = g.tensor(a)
    out = g.maybe(lambda u: u.shape == t.shape and is_float(u)) or g.fresh(t.shape, torch.float32)
    name = g.random.choice(("torch.add", "torch.sub", "torch.mul", "torch.neg", "torch.cumsum"))
    if name == "torch.cumsum":
        rest: Sequence[object] = (g.dim(t),)
    else:
        rest = () if name == "torch.neg" else (g.fitting(t),)
    return Instruction(name, (a, *rest), (("out", out),), writes=(out.index,))


def _reshape_self(g: ProgramWriter) -> Instruction:
    name = g.random.choice(("t_", "transpose_", "squeeze_", "unsqueeze_"))
    a = g.slot(lambda t: t.dim() <= 2) if name == "t_" else g.slot()
    t = g.tensor(a)
    args = {"transpose_": (g.dim(t), g.dim(t)), "unsqueeze_": (0,)}.get(name, ())
    return Instruction(name, (a, *args), writes=(a.index,))


# -- autograd --------------------------------------------------------------------------------------


def _leaf(g: ProgramWriter) -> Instruction:
    return _call(g, "leaf", g.slot(is_float))


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
    return _call(g, "gradients", a, [b])


def _grad(g: ProgramWriter) -> Instruction | None:
    a = g.maybe(lambda t: t.is_leaf and t.grad is not None)
    return _call(g, "grad", a) if a else None


def _use_grad(g: ProgramWriter) -> Instruction | None:
    a = g.maybe(lambda t: t.is_leaf and t.grad is not None)
    if a is None:
        return None
    if g.random.random() < 0.3:
        return Instruction("clear_grad", (a,))
    rate = g.number(torch.zeros(()))
    return Instruction("descend", (a, rate), writes=(a.index,), grad=False)


# -- sharing, lifetimes, steps ---------------------------------------------------------------------


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


FAMILIES: Final[tuple[tuple[Maker, ...], ...]] = (
    (_input, _unary, _tanh, _binary, _scalar_binary, _integer_binary, _comparison, _logical),
    (_where, _join, _reduction, _matmul, _gather, _advanced, _cast, _constant),
    (_select, _slice, _narrow, _view, _reorder, _short_view),
    (_squeeze, _expand, _diagonal, _unfold, _several),
    (_add_in_place, _add_in_place, _fill, _set_item),
    (_copy_from_host, _masked, _masked_values, _index_put, _index_write, _fused, _foreach, _out),
    (_leaf, _backward, _backward, _gradients, _grad, _use_grad, _require),
    (_detach_self, _set_data, _swap, _resize, _reshape_self),
    (_rebind, _drop, _garbage),
    (_observe, _sync),
)
WEIGHTS: Final = (12, 8, 12, 8, 20, 14, 12, 4, 7, 3)
