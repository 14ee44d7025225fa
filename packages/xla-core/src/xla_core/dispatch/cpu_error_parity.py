"""Errors for an operator's invalid operands, with the messages that PyTorch's CPU kernels raise.

PyTorch's meta kernels, which infer shapes, word many errors differently from the kernels that users
know, and let some mistakes pass (mixed dtypes in a matrix product). All of this runs only when an
operator meets operands of these shapes and dtypes for the first time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch._ops import OpOverload

from xla_core.recording.xla_tensor import Handler, XLATensor
from xla_core.support import caches
from xla_core.torch_bridge import dtypes, error_texts
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands

aten = torch.ops.aten

# Operators that write one value, which may be a tensor: their last argument.
_FILLS: Final = frozenset(
    (
        aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor,
        aten.masked_fill.Tensor, aten.masked_fill_.Tensor,
    )
)  # fmt: skip
# Operators that fill a tensor of any size: the positions of what has its size, and of a number.
_FACTORIES: Final = {
    aten.full.default: (0, 1),
    aten.full_like.default: (0, 1),
    aten.linspace.default: (2, 1),
    aten.new_full.default: (1, 2),
}

# Above this many elements an operator is not repeated on the CPU just to word an error.
_MAX_ELEMENTS: Final = 1 << 24

_COMMON_DTYPES: Final = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    }
)  # fmt: skip
# Which every kernel takes that takes any floating-point number.
_PLAIN: Final = frozenset({torch.float32, torch.float64})
_WHOLE: Final = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
# To learn which dtypes an operator takes, it is called on the CPU: with the operands' own shapes up to this number
# of elements.
_FEW_ELEMENTS: Final = 4096
# torch 2.13: the first one's overload refuses a complex dtype that ``torch.norm`` takes. Which dtypes a view may
# have depends on its shape, which its meta kernel checks.
_ASKED_OTHERWISE: Final = (
    aten.norm.ScalarOpt_dim_dtype,
    aten.sspaddmm.default,
    aten.view.dtype,
)
# What other devices count of whole numbers, and libraries give them unless the device is called "cpu".
_TAKES_WHOLE_NUMBERS: Final = (aten.histc.default, aten.histc.out)
# Operators with dtypes that the CPU has taken: those need not be asked for again.
_taken: Final[caches.Bounded[object, None]] = caches.Bounded("dtypes the CPU takes")


_INTEGERS: Final = (torch.int64, torch.int32)
_INDEX_DTYPES: Final = (torch.int64, torch.int32, torch.uint8, torch.bool)


def cpu_error_for(
    overload: OpOverload, args: Sequence[Operand], kwargs: NamedOperands
) -> Exception | None:
    """What the CPU raises for operands of these shapes and dtypes (values are zero, or one), if it does."""
    error = _attempt(overload, args, kwargs, _as_large)
    if error_texts.is_division_by_zero(error):
        error = _attempt(overload, args, kwargs, _filled(1, True, None))
    return error


def are_small(args: Sequence[Operand], kwargs: NamedOperands) -> bool:
    """Whether an operator is repeated on the CPU to learn what it says of such operands."""
    return sum(x.numel() for x in _tensors((args, tuple(kwargs.values())))) <= _MAX_ELEMENTS


def find(overload: OpOverload, args: Sequence[Operand], kwargs: NamedOperands) -> Exception | None:
    """The error for a mistake that the meta kernel of ``overload`` lets pass, or None."""
    error = _overflow(overload, args, kwargs)
    if error is not None:
        return error
    suspicious = _SUSPICIONS.get(overload)
    if suspicious is not None and suspicious(args):
        error = cpu_error_for(overload, args, kwargs)
        if error is not None:
            return error
    if overload._schema.name.startswith("aten::_foreach_") and overload._schema.is_mutable:
        whole = any(not x.is_floating_point() for x in _tensors(tuple(args)))
        return cpu_error_for(overload, args, kwargs) if whole else None
    if torch.Tag.pointwise in overload.tags:
        # One element decides about dtypes as well as many.
        if _has_common_dtypes(args):
            error = _attempt(overload, args, kwargs, _one_element)
            taken = _lacks_half(error) and not _attempt(
                overload, args, kwargs, _filled(1, False, torch.float32)
            )
            return None if taken else error
        if overload._schema.is_mutable and _is_too_narrow(args):
            error = _attempt(overload, args, kwargs, _one_element)
            return None if isinstance(error, NotImplementedError) else error
        return None
    return dtype_error(overload, args, kwargs)


def _overflow(
    overload: OpOverload, args: Sequence[Operand], kwargs: NamedOperands
) -> Exception | None:
    """What the CPU raises because of a number that the first operand's dtype cannot hold, if it does."""
    if torch.Tag.nondeterministic_seeded in overload.tags:
        return None  # seeds are numbers, too; ``random_numbers`` checks the others
    tensors = _tensors(tuple(args))
    dtype = tensors[0].dtype if tensors else kwargs.get("dtype")
    if all(dtypes.holds(dtype, number) for number in _numbers((*args, *kwargs.values()))):
        return None
    if overload in _FACTORIES:
        sized, number = (args[place] for place in _FACTORIES[overload])
        size = sized if isinstance(sized, int) else math.prod(getattr(sized, "shape", sized))
        # all convert the number in the same way, and a single float in another than many
        args, kwargs = [[min(size, 2)], number], {"dtype": kwargs.get("dtype") or dtype}
        overload = aten.full.default
    error = _attempt(overload, args, kwargs, _filled(0, False, None))
    return error if error_texts.is_overflow(error) else None


def checking_value(overload: OpOverload, handler: Handler) -> Handler:
    """``handler``, which first refuses a value in a CPU tensor that the dtype of a filled tensor cannot hold.

    Such a value is an argument of the program, and so no part of what is recorded.
    """
    if overload not in _FILLS:
        return handler

    def checked(args: Operands, kwargs: NamedOperands | None) -> Operand:
        filled, value = args[0], args[-1]
        if _is_number_on_host(value) and not dtypes.holds(filled.dtype, value.item()):
            error = cpu_error_for(overload, args, kwargs or {})
            if error is not None:
                raise error
        return handler(args, kwargs)

    return checked


def _numbers(items: Sequence[Operand]) -> Iterator[complex]:
    """The numbers among operands, with those in CPU tensors that stand for a number."""
    for a in items:
        if type(a) in (int, float, complex):
            yield a
        elif _is_number_on_host(a):
            yield a.item()


def _is_number_on_host(a: Operand) -> bool:
    return type(a) is torch.Tensor and a.device.type == "cpu" and not a.dim()


def dtype_error(
    overload: OpOverload, args: Sequence[object], kwargs: dict[str, object]
) -> Exception | None:
    """What the CPU raises because of the operands' dtypes, ``dtype=`` and ``out=`` among them, if it does.

    An error of small operands of these dtypes counts where the CPU takes the same of one plain dtype: else
    it is about shapes or values, which those operands have not.
    """
    given = (*args, *kwargs.values())
    tensors = _tensors(given)
    others = [a for a in given if isinstance(a, torch.dtype)]
    others += [torch.complex64 for a in given if isinstance(a, complex)]
    every = {*others, *(x.dtype for x in tensors)}
    if not tensors or not every <= _COMMON_DTYPES or overload in _ASKED_OTHERWISE:
        return None
    if overload in _TAKES_WHOLE_NUMBERS and len(every) == 1 and every <= _WHOLE:
        return None
    schema = overload._schema
    if len(every) == 1 and every <= _PLAIN and not schema.is_mutable:
        return None
    if overload.namespace != "aten" or torch.Tag.nondeterministic_seeded in overload.tags:
        return None
    key = (overload, *((x.dtype, x.dim() > 0) for x in tensors), *others)
    if key in _taken:
        return None
    few = sum(x.numel() for x in tensors) <= _FEW_ELEMENTS
    error = None
    for number in (0, 1):  # no index is out of range, then nothing is divided by zero
        make = _filled(number, few, None)
        error = _attempt(overload, args, kwargs, make)
        if error is None:
            _taken.keep(key, None)
            return None
    for plain in (torch.float32, torch.int64):
        of_one_dtype = [_in_dtype(a, plain) for a in args]
        named = {k: _in_dtype(a, plain) for k, a in kwargs.items()}
        if _attempt(overload, of_one_dtype, named, _filled(1, few, plain)) is None:
            return None if plain == torch.float32 and _lacks_half(error) else error
    return None


def _lacks_half(error: Exception | None) -> bool:
    """Whether the CPU has just no kernel for half precision: XLA computes there (distances, Bessel functions)."""
    return error is not None and error_texts.is_missing_half_kernel(error)


def _filled(
    number: int, few: bool, dtype: torch.dtype | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A maker of operands: as large as they are if they are ``few``, of their own dtype without ``dtype``."""

    def make(x: torch.Tensor) -> torch.Tensor:
        return torch.full(x.shape if few else (1,) * x.dim(), number, dtype=dtype or x.dtype)

    return make


def _in_dtype(a: object, dtype: torch.dtype) -> object:
    """Another operand than a tensor in a call with tensors of ``dtype``."""
    if isinstance(a, torch.dtype):
        return dtype
    return 1 if isinstance(a, complex) else a


def _as_large(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape, dtype=x.dtype)


def _one_element(x: torch.Tensor) -> torch.Tensor:
    return torch.ones((1,) * x.dim(), dtype=x.dtype)  # not zero: integers may be divided by it


def _attempt(
    overload: OpOverload,
    args: Sequence[Operand],
    kwargs: NamedOperands,
    stand_in: Callable[[XLATensor], torch.Tensor],
) -> Exception | None:
    named = {k: v for k, v in kwargs.items() if k in {a.name for a in overload._schema.arguments}}
    if "device" in named:
        named["device"] = torch.device("cpu")
    if not are_small(args, named):
        return None
    try:
        same = functools.cache(stand_in)  # an operand given twice is one tensor on the CPU, too
        overload(*_replace(tuple(args), same), **{k: _replace(v, same) for k, v in named.items()})
    except Exception as error:  # whatever the CPU says is what the user should read
        return error.with_traceback(None)
    return None


def _replace(a: Operand, stand_in: Callable[[XLATensor], torch.Tensor]) -> Operand:
    if isinstance(a, XLATensor):
        return stand_in(a)
    if isinstance(a, (list, tuple)):
        return [_replace(item, stand_in) for item in a]
    return a


def _tensors(a: Operand) -> list[torch.Tensor]:
    if isinstance(a, torch.Tensor):
        return [a]
    return [x for item in a for x in _tensors(item)] if isinstance(a, (list, tuple)) else []


def _has_common_dtypes(args: Sequence[Operand]) -> bool:
    # For the others the CPU lacks kernels that the xla device has.
    return all(x.dtype in _COMMON_DTYPES for x in _tensors(tuple(args)))


def _is_too_narrow(args: Sequence[Operand]) -> bool:
    """Whether an operator would write floating-point numbers into integers."""
    target = args[0]
    return isinstance(target, torch.Tensor) and any(
        not torch.can_cast(x.dtype, target.dtype) for x in _tensors(tuple(args[1:]))
    )


def _mixes_dtypes(args: Sequence[Operand]) -> bool:
    return len({x.dtype for x in _tensors(tuple(args))}) > 1


def _has_masks(args: Sequence[Operand]) -> bool:
    """Whether a tensor is boolean, which subtraction refuses whatever the other one is."""
    return any(x.dtype == torch.bool for x in _tensors(tuple(args)))


def _is_empty(args: Sequence[Operand]) -> bool:
    return args[0].numel() == 0


def _has_no_row_numbers(args: Sequence[Operand]) -> bool:
    return args[1].dtype not in (torch.int32, torch.int64)


def _is_no_chance(args: Sequence[Operand]) -> bool:
    # in evaluation nothing is drawn, whatever the probability
    return args[2] is not False and not 0 <= args[1] <= 1


def _is_no_softmax(args: Sequence[Operand]) -> bool:
    x, dim = args[0], args[1]
    return not x.dtype.is_floating_point or not -max(x.dim(), 1) <= dim < max(x.dim(), 1)


def _pads_negatively(args: Sequence[Operand]) -> bool:
    return any(size < 0 for size in args[4])


def _is_no_convolution(args: Sequence[Operand]) -> bool:
    """Whether a step is not positive, the kernel larger than the input, or the bias of another length."""
    x, weight, bias, strides, paddings, dilations, transposed, _, groups = args
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    if bias is not None and bias.shape != (channels,):
        return True
    if any(step <= 0 for step in (*strides, *dilations)):
        return True
    if transposed or len(paddings) != weight.dim() - 2:
        return False
    extents = zip(x.shape[2:], weight.shape[2:], paddings, dilations, strict=False)
    return any(size + 2 * pad < step * (k - 1) + 1 for size, k, pad, step in extents)


def _divides_by_zero(position: int) -> Callable[[Sequence[Operand]], bool]:
    """Whether the divisor, the argument at ``position``, is the number zero."""
    return lambda args: len(args) > position and type(args[position]) is int and not args[position]


def _is_negative(position: int) -> Callable[[Sequence[Operand]], bool]:
    """Whether the number at ``position``, if it is given, is negative."""
    return lambda args: len(args) > position and args[position] < 0


def _is_no_unpooling(rank: int) -> Callable[[Sequence[Operand]], bool]:
    """Whether values have no planes of ``rank`` dimensions, their places are others than they, or no places."""

    def suspicious(args: Sequence[Operand]) -> bool:
        values, places, size, *settings = args
        strides = settings[0] if settings else ()
        return (
            values.shape != places.shape
            or places.dtype != torch.int64
            or values.dim() not in (rank + 1, rank + 2)
            or len(size) != rank
            or any(step <= 0 for step in strides)
        )

    return suspicious


def _searches_no_line(args: Sequence[Operand]) -> bool:
    """Whether boundaries have no dimension, or a number looks for its place in several rows."""
    return args[0].dim() == 0 or (args[0].dim() != 1 and not isinstance(args[1], torch.Tensor))


def _is_not_a_line(args: Sequence[Operand]) -> bool:
    return args[1].dim() != 1


def _are_no_indices(indices: Sequence[Operand]) -> bool:
    return any(i is not None and i.dtype not in _INDEX_DTYPES for i in indices)


def _unless(dtypes: Sequence[torch.dtype], position: int) -> Callable[[Sequence[Operand]], bool]:
    """Whether the tensor at ``position`` has none of ``dtypes``, which the CPU tells in its own words."""

    def suspicious(args: Sequence[Operand]) -> bool:
        return args[position].dtype not in dtypes

    return suspicious


def _reaches_beyond(args: Sequence[Operand]) -> bool:
    """Whether ``as_strided`` (or its copy, or ``as_strided_scatter``) leaves the tensor's elements."""
    source = args[0]
    size, stride, *rest = [a for a in args[1:] if not isinstance(a, torch.Tensor)]
    start = (rest[0] if rest else None) or 0
    if start < 0 or 0 in size or len(size) != len(stride):
        return True  # the CPU knows what it takes of these
    last = start + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return bool(last >= source.numel())


def _can_be_indexed(args: Sequence[Operand]) -> bool:
    # else index 0, which stands in for all, would be out of range
    return args[0].numel() != 0 or args[2].numel() == 0


def _do_values_misfit(args: Sequence[Operand]) -> bool:
    """Whether ``index_put`` cannot broadcast its values to what the indices choose, or their dtype."""
    target, indices, values = args[:3]
    if values.dtype != target.dtype or _are_no_indices(indices):
        return True
    chosen = torch.empty(target.shape, device="meta")[
        tuple(
            slice(None) if i is None else torch.empty(i.shape, dtype=i.dtype, device="meta")
            for i in indices
        )
    ].shape
    fits = zip(reversed(values.shape), reversed(chosen), strict=False)
    return values.dim() > len(chosen) or any(have not in (1, want) for have, want in fits)


def _always(args: Sequence[Operand]) -> bool:
    """For operators without a meta kernel, whose rules' own says no more than shapes."""
    return True


_SUSPICIONS: Final[dict[OpOverload, Callable[[Sequence[object]], bool]]] = {
    aten.sub.Tensor: _has_masks,
    aten.sub_.Tensor: _has_masks,
    aten.mm.default: _mixes_dtypes,
    aten.bmm.default: _mixes_dtypes,
    aten.mv.default: _mixes_dtypes,
    aten.dot.default: _mixes_dtypes,
    aten.addmm.default: _mixes_dtypes,
    aten.addmv.default: _mixes_dtypes,
    aten.baddbmm.default: _mixes_dtypes,
    aten.linear.default: _mixes_dtypes,
    aten.bucketize.Tensor: _is_not_a_line,
    aten.searchsorted.Tensor: _searches_no_line,
    aten.searchsorted.Scalar: _searches_no_line,
    aten.complex.default: _mixes_dtypes,
    aten.convolution.default: lambda args: (
        _mixes_dtypes(args) or _pads_negatively(args) or _is_no_convolution(args)
    ),
    aten.avg_pool2d.default: _divides_by_zero(6),
    aten.avg_pool3d.default: _divides_by_zero(6),
    aten.index_add.default: _can_be_indexed,
    aten.index_add_.default: _can_be_indexed,
    aten.index_copy.default: _can_be_indexed,
    aten.index_copy_.default: _can_be_indexed,
    aten.as_strided.default: _reaches_beyond,
    aten.as_strided_copy.default: _reaches_beyond,
    aten.as_strided_scatter.default: _reaches_beyond,
    aten.index_fill.int_Scalar: _unless((torch.int64,), 2),
    aten.index_fill.int_Tensor: _unless((torch.int64,), 2),
    aten.index_fill_.int_Scalar: _unless((torch.int64,), 2),
    aten.index_fill_.int_Tensor: _unless((torch.int64,), 2),
    aten.index_reduce.default: _unless(_INTEGERS, 2),
    aten.index_reduce_.default: _unless(_INTEGERS, 2),
    aten.index_select.default: _unless(_INTEGERS, 2),
    aten.masked_scatter.default: _unless((torch.bool,), 1),
    aten.masked_scatter_.default: _unless((torch.bool,), 1),
    aten.max_unpool2d.default: _is_no_unpooling(2),
    aten.max_unpool3d.default: _is_no_unpooling(3),
    aten.masked_fill_.Scalar: _unless((torch.bool,), 1),
    aten.masked_fill_.Tensor: _unless((torch.bool,), 1),
    aten.multi_margin_loss.default: _unless((torch.int64,), 1),
    aten.multilabel_margin_loss_forward.default: _unless((torch.int64,), 1),
    aten.native_dropout.default: _is_no_chance,
    aten.nll_loss_forward.default: _unless((torch.int64, torch.uint8), 1),
    aten.nll_loss2d_forward.default: _unless((torch.int64,), 1),
    aten.put.default: _unless((torch.int64,), 1),
    aten.put_.default: _unless((torch.int64,), 1),
    aten.index_put.default: _do_values_misfit,
    aten.index_put_.default: _do_values_misfit,
    aten.embedding.default: _has_no_row_numbers,
    aten.max.default: _is_empty,
    aten.max.dim: _is_empty,
    aten.min.dim: _is_empty,
    aten.min.default: _is_empty,
    aten.floor_divide.default: _divides_by_zero(1),
    aten.floor_divide.Scalar: _divides_by_zero(1),
    aten.floor_divide_.Scalar: _divides_by_zero(1),
    aten.floor_divide_.Tensor: _divides_by_zero(1),
    aten.renorm.default: _is_negative(3),
    aten.smooth_l1_loss.default: _is_negative(3),
    aten._softmax.default: _is_no_softmax,
    aten._log_softmax.default: _is_no_softmax,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _always,
    aten.histogram.bin_ct: _always,
    aten.histogram.bins_tensor: _always,
    aten._histogramdd_bin_edges.default: _always,
    aten._histogramdd_from_bin_cts.default: _always,
    aten._histogramdd_from_bin_tensors.default: _always,
}
