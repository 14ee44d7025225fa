"""Operators that are recorded as one, though PyTorch's C++ defines them by others.

``linear`` is a transpose, views, a product and a sum to C++, and autograd differentiates each of them: four
operators and ten in the backward pass, each through all of PyTorch's layers. Attention is about eighteen and as
many, an LSTM cell ten and thirteen. A kernel that is registered here stands before autograd and chooses
between the whole and the parts; the lowering rules compute what the parts would.

Autograd has derivatives of some whole operators, which it takes for nested tensors (``linear``) or CUDA
(cells) only. Attention's are here.

Where no gradient is recorded, nothing lies between these kernels and ``__torch_dispatch__``, so that it is
called at once. Batch norm in evaluation needs its first result only then; with gradients it leaves out a tensor
that PyTorch reserves for cuDNN. Convolutions are here for inference mode, which has no C++ above Python.

``fill_diagonal_`` is here because its parts are wrong on views: they call ``as_strided`` with the offset of their
operand, and an xla tensor reports that it begins at 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch._ops import OpOverload
from torch.autograd import forward_ad

from xla_core.torch_bridge import op_library as op_library
from xla_core.torch_bridge.operands import Gradients, Operand
from xla_core.torch_bridge.reference_kernels import keep_whole

_Key: Final = torch._C.DispatchKey  # torch 2.11 to 2.15, as all names of torch._C below
# The key under which autograd has its derivatives of operators that C++ defines by others; what it calls
# then goes on to ``__torch_dispatch__``.
_AS_NESTED: Final = (
    torch._C.DispatchKeySet(_Key.AutogradNestedTensor)
    | torch._C.DispatchKeySet(_Key.Python)
    | torch._C.DispatchKeySet(_Key.XLA)
)
_libraries: list[torch.library.Library] = []  # registrations end with the object

_grad_mode: Final = torch.is_grad_enabled
_modes: Final = torch._C._len_torch_dispatch_stack
_transforms: Final = torch._C._are_functorch_transforms_active
_aten: Final = torch.ops.aten
_AUTOGRAD: Final = (
    torch._C.DispatchKeySet(_Key.AutogradXLA)
    | torch._C.DispatchKeySet(_Key.Python)
    | torch._C.DispatchKeySet(_Key.XLA)
)
_with_statistics: Final = functools.partial(
    _aten.native_batch_norm.default._handle.redispatch_boxed, _AUTOGRAD
)
_linear_as_one: Final = functools.partial(_aten.linear.default._handle.redispatch_boxed, _AS_NESTED)

MayStayWhole: TypeAlias = Callable[[torch.Tensor], bool]
Kernel: TypeAlias = Callable[..., Operand]
KernelMaker: TypeAlias = Callable[[type[torch.Tensor], MayStayWhole], Kernel]

_kernels: dict[OpOverload, Kernel] = {}


def is_watched() -> bool:
    """Whether a mode or a transform wants to see the operators that a whole one replaces.

    That is a mode of ``torch.utils._python_dispatch``: one that counts products, chooses what a checkpoint
    keeps, or writes a graph; but none whose class says ``sees_whole_operators = True``. Or forward-mode
    differentiation, which has no derivatives of whole operators.
    """
    return (_modes() > 0 and not _modes_see_wholes()) or forward_ad._current_level >= 0


def _modes_see_wholes() -> bool:
    active = map(torch._C._get_dispatch_stack_at, range(_modes()))
    return all(getattr(mode, "sees_whole_operators", False) for mode in active)


def _wants_gradients(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> bool:
    """Whether autograd has to see an operator on these."""
    return _grad_mode() and (
        (weight is not None and weight.requires_grad)
        or input.requires_grad
        or (bias is not None and bias.requires_grad)
    )


def _by_parts(overload: OpOverload) -> Kernel:
    return functools.partial(overload._op_dk, _Key.CompositeImplicitAutograd)


def _linear(tensor_class: type[torch.Tensor], may_stay_whole: MayStayWhole) -> Kernel:
    by_parts = _by_parts(_aten.linear.default)
    record: Kernel = tensor_class.__torch_dispatch__

    def linear(input: Operand, weight: Operand, bias: Operand = None) -> Operand:
        """``linear`` as one operator where the operands have the ranks that layers have."""
        if (
            type(input) is tensor_class
            and type(weight) is tensor_class
            and (bias is None or (type(bias) is tensor_class and bias.dim() == 1))
            and weight.dim() == 2
            and input.dim() > 1
            and not is_watched()
        ):
            if _wants_gradients(input, weight, bias) or _transforms() or _modes():
                return _linear_as_one(input, weight, bias)
            operands = (input, weight) if bias is None else (input, weight, bias)
            return record(_aten.linear.default, (), operands)
        return by_parts(input, weight, bias)

    return linear


# -- convolution and batch norm --------------------------------------------------------------------


def _convolution(
    dimensions: int, tensor_class: type[torch.Tensor], may_stay_whole: MayStayWhole
) -> Kernel:
    overload = getattr(_aten, f"conv{dimensions}d").default
    by_parts = _by_parts(overload)
    record: Kernel = tensor_class.__torch_dispatch__
    ones, zeros = [1] * dimensions, [0] * dimensions

    def convolution(
        input: Operand,
        weight: Operand,
        bias: Operand = None,
        stride: Sequence[int] = ones,
        padding: Sequence[int] = zeros,
        dilation: Sequence[int] = ones,
        groups: int = 1,
    ) -> Operand:
        """``convolution`` of a batch; below autograd."""
        if (
            type(input) is tensor_class
            and type(weight) is tensor_class
            and (bias is None or type(bias) is tensor_class)
            and input.dim() == dimensions + 2
            and input.is_floating_point()
            and (bias is None or bias.dtype == input.dtype)
            and not _modes()  # which see this operator among the parts
            and not is_watched()
            and not _transforms()
        ):
            sizes = (stride, padding, dilation, False, zeros, groups)
            return record(_aten.convolution.default, (), (input, weight, bias, *sizes))
        return by_parts(input, weight, bias, stride, padding, dilation, groups)

    return convolution


def _are_of_channels(input: torch.Tensor, operands: Sequence[torch.Tensor | None]) -> bool:
    """Whether there are values to normalise, and each operand that there is has one number per channel."""
    shape = input.shape
    return (
        len(shape) > 1
        and 0 not in shape
        and all(t is None or t.numel() == shape[1] for t in operands)
    )


def _batch_norm(tensor_class: type[torch.Tensor], may_stay_whole: MayStayWhole) -> Kernel:
    by_parts = _by_parts(_aten.batch_norm.default)
    by_statistics = torch.ops.xla.batch_norm_inference.default
    record: Kernel = tensor_class.__torch_dispatch__

    def batch_norm(
        input: Operand,
        weight: Operand,
        bias: Operand,
        running_mean: Operand,
        running_var: Operand,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> Operand:
        """Batch norm by the running statistics as one operator, where no gradient is recorded."""
        if (
            type(input) is type(running_mean) is type(running_var) is tensor_class
            and (weight is None or type(weight) is tensor_class)
            and (bias is None or type(bias) is tensor_class)
            and not is_watched()
            and not _transforms()
            and may_stay_whole(running_mean)
        ):
            operands = (input, weight, bias, running_mean, running_var)
            if not training and not (_grad_mode() and _wants_gradients(input, weight, bias)):
                if _modes():
                    return by_statistics(*operands, eps)
                return record(by_statistics, (), (*operands, eps))
            if _are_of_channels(input, operands[1:]):
                return _with_statistics(*operands, training, momentum, eps)[0]
        return by_parts(
            input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
        )

    return batch_norm


def _rms_norm(tensor_class: type[torch.Tensor], _may_stay_whole: MayStayWhole) -> Kernel:
    by_parts = _by_parts(_aten.rms_norm.default)
    whole = _aten._fused_rms_norm.default
    keep_whole(whole)
    record: Kernel = tensor_class.__torch_dispatch__
    differentiated = functools.partial(whole._handle.redispatch_boxed, _AUTOGRAD)

    def rms_norm(
        input: Operand,
        normalized_shape: Sequence[int],
        weight: Operand = None,
        eps: float | None = None,
    ) -> Operand:
        """``rms_norm`` of floats as one operator; of nothing, and with an error, by its parts."""
        if (
            type(input) is tensor_class
            and (weight is None or type(weight) is tensor_class)
            and input.is_floating_point()
            and not is_watched()
            and not _transforms()
        ):
            if weight is not None and weight.dtype != input.dtype:
                # the whole would give the weight a gradient of the input's dtype
                if weight.dtype == torch.float32 and input.dtype in (torch.bfloat16, torch.float16):
                    wide = rms_norm(input.to(torch.float32), normalized_shape, weight, eps)
                    return wide.to(input.dtype)
                return by_parts(input, normalized_shape, weight, eps)
            sizes = tuple(normalized_shape)
            if (
                sizes
                and input.shape[-len(sizes) :] == sizes
                and input.numel()
                and (weight is None or weight.shape == sizes)
            ):
                operands = (input, list(sizes), weight, eps)
                if _wants_gradients(input, weight, None) or _modes():
                    return differentiated(*operands)[0]
                return record(whole, (), operands)[0]
        return by_parts(input, normalized_shape, weight, eps)

    return rms_norm


# -- attention -------------------------------------------------------------------------------------


class ScaledDotProductAttention(torch.autograd.Function):
    """Attention, differentiated as a whole; where its gradients are differentiated, by its parts."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> torch.Tensor:
        """What ``scaled_dot_product_attention`` gives without dropout."""
        result, weights = torch.ops.xla.attention.default(query, key, value, mask, is_causal, scale)
        ctx.save_for_backward(query, key, value, mask, weights)
        ctx.is_causal, ctx.scale = is_causal, scale
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        """The gradients of query, key and value; a mask has none."""
        query, key, value, mask, weights = ctx.saved_tensors
        if torch.is_grad_enabled():
            # views: one tensor may be all three, and each use of it has a gradient of its own
            uses = [t.view_as(t) for t in (query, key, value)]
            result = _attention_by_parts(*uses, mask, 0.0, ctx.is_causal, scale=ctx.scale)
            wanted = [t for t, needed in zip(uses, ctx.needs_input_grad, strict=False) if needed]
            given = iter(torch.autograd.grad(result, wanted, gradient, create_graph=True))
            gradients = [next(given) if needed else None for needed in ctx.needs_input_grad[:3]]
        else:
            gradients = torch.ops.xla.attention_backward.default(
                gradient, query, key, value, weights, ctx.scale
            )
        return (*gradients, None, None, None)


_attention_by_parts: Final = _by_parts(_aten.scaled_dot_product_attention.default)


def _is_mask(mask: torch.Tensor, query: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether ``mask`` is a constant that broadcasts to the scores, of this shape."""
    dtype, sizes = mask.dtype, mask.shape
    return (
        (dtype == torch.bool or dtype == query.dtype)
        and not mask.requires_grad
        and len(sizes) <= len(shape)
        and all(a in (1, b) for a, b in zip(reversed(sizes), reversed(shape), strict=False))
    )


def _attention(tensor_class: type[torch.Tensor], may_stay_whole: MayStayWhole) -> Kernel:
    def attention(
        query: Operand,
        key: Operand,
        value: Operand,
        attn_mask: Operand = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Operand:
        """Attention as one operator, without dropout and where nothing is broadcast but the mask."""
        if (
            type(query) is type(key) is type(value) is tensor_class
            and dropout_p == 0.0
            and not enable_gqa
            and (attn_mask is None or (type(attn_mask) is tensor_class and not is_causal))
            and not is_watched()
            and not _transforms()
            and query.dtype == key.dtype == value.dtype
            and query.is_floating_point()
            and may_stay_whole(query)
        ):
            *lead, length, width = query.shape
            *heads, seen, key_width = key.shape
            shape = (*lead, length, seen)
            usual = 1 / math.sqrt(width) if width else 0.0
            factor = usual if scale is None else scale
            if (
                lead == heads
                and key_width == width
                and value.shape[:-1] == key.shape[:-1]
                and len(lead) > 0
                and factor > 0
                and (attn_mask is None or _is_mask(attn_mask, query, shape))
            ):
                wanted = query.requires_grad or key.requires_grad or value.requires_grad
                if wanted and torch.is_grad_enabled():
                    return ScaledDotProductAttention.apply(
                        query, key, value, attn_mask, is_causal, factor
                    )
                return torch.ops.xla.attention.default(
                    query, key, value, attn_mask, is_causal, factor
                )[0]
        return _attention_by_parts(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return attention


# -- cells of recurrent networks -------------------------------------------------------------------


def _lstm_cell(tensor_class: type[torch.Tensor], may_stay_whole: MayStayWhole) -> Kernel:
    by_parts = _by_parts(_aten.lstm_cell.default)

    def lstm_cell(
        input: Operand,
        hx: Operand,
        w_ih: Operand,
        w_hh: Operand,
        b_ih: Operand = None,
        b_hh: Operand = None,
    ) -> Operand:
        """Two linear layers and all that follows them as one operator; its gates have one dtype."""
        operands = [input, *hx, w_ih, w_hh]
        if (
            len(operands) == 5
            and all(type(t) is tensor_class for t in operands)
            and (b_ih is None or type(b_ih) is tensor_class)
            and (b_hh is None or type(b_hh) is tensor_class)
            and not is_watched()
            and not torch.is_autocast_enabled("xla")
            and may_stay_whole(w_ih)
        ):
            hidden, cell = hx
            shape = hidden.shape
            if (
                len(shape) == 2
                and cell.shape == shape
                and w_hh.shape == (4 * shape[1], shape[1])
                and w_ih.shape == (4 * shape[1], input.shape[-1])
                and input.shape[:-1] == shape[:1]
                and input.is_floating_point()
                and all(t.dtype == input.dtype for t in operands)
            ):
                from_input = _linear_as_one(input, w_ih, b_ih)
                from_hidden = _linear_as_one(hidden, w_hh, b_hh)
                return _aten._thnn_fused_lstm_cell.default(from_input, from_hidden, cell)[:2]
        return by_parts(input, hx, w_ih, w_hh, b_ih, b_hh)

    return lstm_cell


def _ctc_loss(tensor_class: type[torch.Tensor], _may_stay_whole: MayStayWhole) -> Kernel:
    by_parts = _by_parts(_aten.ctc_loss.Tensor)

    def ctc_loss(
        log_probs: Operand,
        targets: Operand,
        input_lengths: Operand,
        target_lengths: Operand,
        *options: Operand,
    ) -> Operand:
        """``ctc_loss`` by its parts, with lengths on the device: users leave them on the CPU.

        Of a plain tensor PyTorch reads them there; of a subclass it computes with them as they are.
        """
        lengths = (
            x.to(log_probs.device) if type(log_probs) is tensor_class and x.is_cpu else x
            for x in (input_lengths, target_lengths)
        )
        return by_parts(log_probs, targets, *lengths, *options)

    return ctc_loss


# -- an operator that looks at offsets -------------------------------------------------------------


def _fill_diagonal(tensor_class: type[torch.Tensor], _may_stay_whole: MayStayWhole) -> Kernel:
    by_parts = _by_parts(_aten.fill_diagonal_.default)

    def fill_diagonal_(input: Operand, value: Operand, wrap: bool = False) -> Operand:
        """``fill_diagonal_`` through views that show the diagonal, wherever the elements lie."""
        if type(input) is not tensor_class:
            return by_parts(input, value, wrap)
        shape = tuple(input.shape)
        by_parts(torch.empty(shape, dtype=input.dtype, device="meta"), value, wrap)  # its errors
        if len(shape) == 2:
            rows, columns = shape
            period = columns + 1 if wrap else max(rows, 1)
            for start in range(0, rows, period):
                input[start : start + columns].diagonal().fill_(value)
            return input
        diagonal = input.diagonal()
        for _ in shape[2:]:
            diagonal = diagonal.diagonal(0, 0, -1)
        diagonal.fill_(value)
        return input

    return fill_diagonal_


_MAKERS: Final[dict[str, KernelMaker]] = {
    "ctc_loss.Tensor": _ctc_loss,
    "fill_diagonal_": _fill_diagonal,
    "linear": _linear,
    "batch_norm": _batch_norm,
    "rms_norm": _rms_norm,
    "scaled_dot_product_attention": _attention,
    "lstm_cell": _lstm_cell,
}
# Above autograd a call of these kernels costs more than it saves.
_IN_INFERENCE_MODE: Final[dict[str, KernelMaker]] = {
    "conv1d": functools.partial(_convolution, 1),
    "conv2d": functools.partial(_convolution, 2),
    "conv3d": functools.partial(_convolution, 3),
}
# Autograd calls these, which C++ defines by others for all devices but its own: by seven, each rounded.
_GRADIENTS: Final = ("silu_backward", "mish_backward")


def whole_kernel(overload: OpOverload) -> Kernel | None:
    """What chooses between the whole and the parts of an operator; None for all but those that are kept whole.

    In inference mode, which skips autograd, nothing else calls it.
    """
    return _kernels.get(overload)


def leave_whole(tensor_class: type[torch.Tensor], may_stay_whole: MayStayWhole) -> None:
    """Let these operators arrive at tensors of a class as one, unless something needs the parts. Works once.

    ``may_stay_whole(tensor)`` says where whole operators are lowered as well as their parts.
    """
    if not _libraries:
        library = torch.library.Library("aten", "IMPL")
        for name, make in _MAKERS.items():
            packet, _, overload = name.partition(".")
            kernel = make(tensor_class, may_stay_whole)
            _kernels[getattr(getattr(_aten, packet), overload or "default")] = kernel
            library.impl(name, kernel, "AutogradXLA")
        for name in _GRADIENTS:
            keep_whole(getattr(_aten, name).default)
        for name, make in _IN_INFERENCE_MODE.items():
            _kernels[getattr(_aten, name).default] = make(tensor_class, may_stay_whole)
        _libraries.append(library)
