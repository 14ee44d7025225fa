"""Linear layers with weights of 8 or 4 bits, and one scale per output, or per output and block of inputs.

``torch.ops.xla.quantized_matmul`` is torch_xla's operator, for ``xla`` and CPU tensors. Its shapes, with ``blocks``
= inputs / ``block_size``:

| | weight, int8 | scaler and zero point |
|---|---|---|
| per channel (``block_size`` -1) | (outputs, inputs) | (outputs,) |
| blockwise | (blocks, block_size, outputs) | (blocks, outputs) |
"""

from __future__ import annotations

from typing import Final

import jax.numpy as jnp
import torch
from jax import Array, lax
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from xla_core.kernels.kernel_operator import operator
from xla_core.kernels.quantized import product, rounded_rows
from xla_core.torch_bridge.op_library import XLA_LIB
from xla_core.torch_bridge.operands import Gradients, Operand

PER_CHANNEL: Final = -1

MSG_DTYPE: Final = "quantized weights are int8 (those of 4 bits too), got {dtype}"
MSG_SHAPE: Final = (
    "the {what} has the shape {got}; for {inputs} inputs and {outputs} outputs{how} it is {wanted}"
)
MSG_BLOCKS: Final = "{inputs} inputs are not a whole number of blocks of {block_size}"
MSG_ACTIVATION: Final = (
    "quantize_activation works with one scale per output (block_size -1), got block_size "
    "{block_size}"
)
MSG_NO_GRADIENT: Final = (
    "quantized_matmul(quantize_activation=True) rounds its operand and has no gradient; train with "
    "quantize_activation=False"
)

_LARGEST: Final = 127


def check(
    inputs: int,
    outputs: int,
    block_size: int,
    weight: torch.Tensor,
    scaler: torch.Tensor,
    zero_point: torch.Tensor | None,
) -> None:
    """Raise ValueError unless weight, scaler and zero point have the dtype and shapes of the module's table."""
    if weight.dtype != torch.int8:
        raise ValueError(MSG_DTYPE.format(dtype=weight.dtype))
    wanted, scales = shapes(inputs, outputs, block_size)
    how = "" if block_size == PER_CHANNEL else f" in blocks of {block_size}"
    for what, tensor, shape in (
        ("weight", weight, wanted),
        ("weight scaler", scaler, scales),
        ("zero point", zero_point, scales),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            sizes = {"got": tuple(tensor.shape), "wanted": shape}
            raise ValueError(
                MSG_SHAPE.format(what=what, inputs=inputs, outputs=outputs, how=how, **sizes)
            )


def shapes(inputs: int, outputs: int, block_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of weight and scaler. Raises ValueError if the block size does not divide the inputs."""
    if block_size == PER_CHANNEL:
        return (outputs, inputs), (outputs,)
    if block_size < 1 or inputs % block_size:
        raise ValueError(MSG_BLOCKS.format(inputs=inputs, block_size=block_size))
    blocks = inputs // block_size
    return (blocks, block_size, outputs), (blocks, outputs)


def _check_call(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    block_size: int | None,
    quantize_activation: bool | None,
) -> int:
    """Check the operator's arguments, and return the block size."""
    size = PER_CHANNEL if block_size is None else block_size
    if size != PER_CHANNEL and quantize_activation:
        raise ValueError(MSG_ACTIVATION.format(block_size=size))
    check(x.shape[-1], scale.shape[-1], size, w, scale, zero_point)
    return size


def _meta(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    block_size: int | None = PER_CHANNEL,
    int4_weight: bool | None = False,
    quantize_activation: bool | None = False,
) -> torch.Tensor:
    _check_call(x, w, scale, zero_point, block_size, quantize_activation)
    dtype = torch.promote_types(x.dtype, scale.dtype)
    return x.new_empty((*x.shape[:-1], scale.shape[-1]), dtype=dtype)


# -- on an xla device -------------------------------------------------------------------------------


@operator(
    "quantized_matmul(Tensor x, Tensor w, Tensor scale, Tensor? zero_point=None, int? block_size=-1, "
    "bool? int4_weight=False, bool? quantize_activation=False) -> Tensor",
    _meta,
)
def lower(
    x: Array,
    w: Array,
    scale: Array,
    zero_point: Array | None = None,
    block_size: int | None = PER_CHANNEL,
    int4_weight: bool | None = False,
    quantize_activation: bool | None = False,
) -> Array:
    """The product, summed in float32 at least, or of integers with a scale per row of ``x``."""
    if int4_weight:
        w = w.astype(jnp.int4).astype(jnp.int8)  # tells the compiler that 4 bits are enough
    wide = jnp.promote_types(jnp.promote_types(x.dtype, scale.dtype), jnp.float32)
    if block_size is not None and block_size != PER_CHANNEL:
        return _blockwise(x, w, scale.astype(wide), zero_point, block_size)
    rows: object = 1
    if quantize_activation:
        x, rows = rounded_rows(x)
        total = product(x, w, jnp.int32).astype(wide) * scale
    else:
        total = product(x, w.astype(x.dtype), wide) * scale
    if zero_point is not None:
        total = total - x.astype(wide).sum(-1, keepdims=True) * zero_point
    return total * rows


def _blockwise(
    x: Array, w: Array, scale: Array, zero_point: Array | None, block_size: int
) -> Array:
    cut = x.reshape(*x.shape[:-1], -1, block_size)
    block = cut.ndim - 2
    products = lax.dot_general(
        cut,
        w.astype(x.dtype),
        (((block + 1,), (1,)), ((block,), (0,))),
        preferred_element_type=scale.dtype,
    )
    total = jnp.einsum("s...n,sn->...n", products, scale)
    if zero_point is not None:
        total = total - cut.astype(scale.dtype).sum(-1) @ zero_point.astype(scale.dtype)
    return total


# -- elsewhere, and gradients -----------------------------------------------------------------------


def _on_cpu(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    block_size: int | None = PER_CHANNEL,
    int4_weight: bool | None = False,
    quantize_activation: bool | None = False,
) -> torch.Tensor:
    """``quantized_matmul`` on the CPU, by PyTorch's own operators."""
    size = _check_call(x, w, scale, zero_point, block_size, quantize_activation)
    dtype = torch.promote_types(x.dtype, scale.dtype)
    if size != PER_CHANNEL:
        cut = x.unflatten(-1, (-1, size)).to(dtype)
        products = torch.einsum("scn,...sc->...sn", w.to(dtype), cut)
        total = torch.einsum("sn,...sn->...n", scale.to(dtype), products)
        return total if zero_point is None else total - cut.sum(-1) @ zero_point.to(dtype)
    rows: torch.Tensor | int = 1
    if quantize_activation:
        wide = x.float()  # a quotient in bfloat16 could round to 128, which int8 cannot hold
        rows = wide.abs().amax(-1, keepdim=True) / _LARGEST
        rows = rows.where(rows != 0, torch.ones_like(rows))
        x = (wide / rows).round()
        total = F.linear(x.to(torch.int32), w.to(torch.int32)) * scale
    else:
        total = F.linear(x, w.to(x.dtype)) * scale
    if zero_point is not None:
        total = total - x.sum(-1, keepdim=True) * zero_point
    return (total * rows).to(dtype)


XLA_LIB.impl("quantized_matmul", _on_cpu, "CPU")


def _keep(ctx: FunctionCtx, inputs: tuple[Operand, ...], output: torch.Tensor) -> None:
    _, w, scale, zero_point, block_size, _, quantize_activation = inputs
    ctx.save_for_backward(w, scale, zero_point)
    ctx.block_size = PER_CHANNEL if block_size is None else block_size
    ctx.rounds = quantize_activation


def _gradient(context: FunctionCtx, given: torch.Tensor) -> Gradients:
    """The gradient of ``x``; the other operands have none."""
    if context.rounds:
        raise RuntimeError(MSG_NO_GRADIENT)
    w, scale, zero_point = context.saved_tensors
    if context.block_size == PER_CHANNEL:
        gradient = (given * scale) @ w.to(given.dtype)
        if zero_point is not None:
            gradient = gradient - (given * zero_point).sum(-1, keepdim=True)
    else:
        dtype = given.dtype
        blocks = torch.einsum("...n,sn,scn->...sc", given, scale.to(dtype), w.to(dtype))
        if zero_point is not None:
            blocks = blocks - torch.einsum("...n,sn->...s", given, zero_point.to(dtype))[..., None]
        gradient = blocks.flatten(-2)
    return (gradient, None, None, None, None, None, None)


torch.library.register_autograd(
    "xla::quantized_matmul", _gradient, setup_context=_keep, lib=XLA_LIB
)


# -- the layer --------------------------------------------------------------------------------------


def quantized_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    scaler: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    block_size: int = PER_CHANNEL,
    int4_weight: bool = False,
    quantize_activation: bool = False,
) -> torch.Tensor:
    """``x @ (w * scaler).T - sum(x) * zero_point``, as ``torch.ops.xla.quantized_matmul``.

    ``x`` is (..., inputs) and the result (..., outputs), in the common dtype of ``x`` and ``scaler``. The shapes of
    the other tensors depend on ``block_size`` (default: -1, per channel), see the module's table. ``int4_weight``
    (default: False) says that the int8 weights are from -8 to 7. With ``quantize_activation`` (default: False) each
    row of ``x`` is rounded to int8, too, and there is no gradient; otherwise ``x`` has one. Raises ValueError for
    shapes or dtypes that do not fit, and for ``quantize_activation`` with blocks.
    """
    product: torch.Tensor = torch.ops.xla.quantized_matmul(
        x, w, scaler, zero_point, block_size, int4_weight, quantize_activation
    )
    return product


class XlaQuantizedLinear(nn.Module):
    """A linear layer without bias, whose weight is int8 with scales; see the module's table of shapes.

    ``int4_weight`` says that the weights are from -8 to 7; they are kept as int8. With ``quantize_activation`` each
    row of the input is rounded to int8, too. Unless ``is_symmetric``, there is a zero point, and ``sum(x) *
    zero_point`` is subtracted. Raises ValueError if the block size does not divide ``input_dim``, and for
    ``quantize_activation`` with blocks.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        is_symmetric: bool = False,
        block_size: int = PER_CHANNEL,
        int4_weight: bool = False,
        quantize_activation: bool = False,
    ) -> None:
        super().__init__()
        if block_size != PER_CHANNEL and quantize_activation:
            raise ValueError(MSG_ACTIVATION.format(block_size=block_size))
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.is_symmetric = is_symmetric
        self.block_size = block_size
        self.int4_weight = int4_weight
        self.quantize_activation = quantize_activation
        weight, scales = shapes(input_dim, output_dim, block_size)
        self.register_buffer("weight", torch.zeros(weight, dtype=torch.int8))
        self.register_buffer("weight_scaler", torch.zeros(scales))
        self.register_buffer("zero_point", None if is_symmetric else torch.zeros(scales))

    def load_quantized_weight(
        self,
        weight: torch.Tensor,
        weight_scaler: torch.Tensor,
        zero_point: torch.Tensor | None = None,
    ) -> None:
        """Use these tensors, which were quantized elsewhere. Raises ValueError if they do not fit."""
        check(self.input_dim, self.output_dim, self.block_size, weight, weight_scaler, zero_point)
        self.weight = weight
        self.weight_scaler = weight_scaler
        self.zero_point = zero_point

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., input_dim) to (..., output_dim)."""
        product: torch.Tensor = torch.ops.xla.quantized_matmul(
            x,
            self.weight,
            self.weight_scaler,
            self.zero_point,
            block_size=self.block_size,
            int4_weight=self.int4_weight,
            quantize_activation=self.quantize_activation,
        )
        return product

    def extra_repr(self) -> str:
        """The layer's options, for ``print``."""
        return (
            f"{self.input_dim}, {self.output_dim}, is_symmetric={self.is_symmetric}, "
            f"block_size={self.block_size}, int4_weight={self.int4_weight}, "
            f"quantize_activation={self.quantize_activation}"
        )
