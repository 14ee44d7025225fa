"""Matrix products and the linear layer.

Half-precision operands are multiplied with a float32 accumulator and rounded once at the end, as
PyTorch's CPU kernels do. ``alpha`` and ``beta`` are lifted; a ``beta`` of exactly 0 arrives as a
Python number and leaves the added tensor out, so that its NaNs do not spread.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.lowering.rules.common import Scalar
from xla_core.operators import target
from xla_core.operators.lowering_registry import aten, rule

_SCALARS = ("beta", "alpha")
_WIDEST = 4
"""An MLP is up to this many times as wide inside as outside."""


def accumulator(dtype: np.dtype) -> np.dtype:
    """The dtype a product of ``dtype`` is summed in: float32 for the half-precision ones."""
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        return np.dtype(np.float32)
    return dtype


def dot_general(
    left: Array,
    right: Array,
    contract: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
    result: np.dtype | None = None,
) -> Array:
    """``lax.dot_general`` whose result stays in the accumulator's dtype, or is of the dtype ``result``."""
    wide = accumulator(left.dtype) if result is None else result
    return lax.dot_general(left, right, (contract, batch), preferred_element_type=wide)


def product(
    left: Array,
    right: Array,
    turned: tuple[bool, bool] = (False, False),
    result: np.dtype | None = None,
) -> Array:
    """``left @ right`` of equal rank, over shared batch dimensions.

    ``turned`` says which of the two is given with its last two dimensions swapped; ``result`` is the dtype of the
    result (default: the accumulator's).
    """
    batch = tuple(range(left.ndim - 2))
    over = (left.ndim - 1 - turned[0],), (left.ndim - 2 + turned[1],)
    return dot_general(left, right, over, (batch, batch), result)


def blend(added: Array, beta: Scalar, total: Array, alpha: Scalar) -> Array:
    """``beta * added + alpha * total`` in the dtype of ``added``."""
    if not (isinstance(alpha, (int, float)) and alpha == 1):
        total = total * jnp.asarray(alpha).astype(total.dtype)
    if not (isinstance(beta, (int, float)) and beta == 0):
        wide = added.astype(total.dtype)
        if not (isinstance(beta, (int, float)) and beta == 1):
            wide = wide * jnp.asarray(beta).astype(total.dtype)
        total = total + wide
    return total.astype(added.dtype)


@rule(aten.mm.default, aten.bmm.default)
def mm(self: Array, mat2: Array, *, turned: tuple[bool, bool] = (False, False)) -> Array:
    """Matrix product, batched or not."""
    return product(self, mat2, turned, _matrix_dtype(self, mat2)).astype(self.dtype)


def _matrix_dtype(left: Array, right: Array) -> np.dtype | None:
    """The dtype in which a product of matrices is asked for, None for the accumulator's.

    A TPU's matrix units sum bfloat16 in float32 whatever the result is. There the result is bfloat16 at once:
    over a mesh what devices add up is half as large then, as with jax.
    """
    device = target.current()
    on_tpu = device is not None and device.platform == "tpu"
    return left.dtype if on_tpu and left.dtype == right.dtype == jnp.bfloat16 else None


@rule(aten._int_mm.default)
def int_mm(self: Array, mat2: Array) -> Array:
    """Product of matrices of 8-bit whole numbers, summed in 32 bits."""
    return dot_general(self, mat2, ((1,), (0,)), result=np.dtype(np.int32))


@rule(aten.addmm.default, aten.baddbmm.default, lift=_SCALARS)
def addmm(
    self: Array,
    mat1: Array,
    mat2: Array,
    *,
    beta: Scalar = 1,
    alpha: Scalar = 1,
    turned: tuple[bool, bool] = (False, False),
) -> Array:
    """``beta * self + alpha * mat1 @ mat2``, batched or not."""
    return blend(self, beta, product(mat1, mat2, turned), alpha)


@rule(aten.addbmm.default, lift=_SCALARS)
def addbmm(
    self: Array, batch1: Array, batch2: Array, *, beta: Scalar = 1, alpha: Scalar = 1
) -> Array:
    """``beta * self + alpha * sum(batch1 @ batch2)`` over the batch."""
    total = jnp.einsum(
        "bij,bjk->ik", batch1, batch2, preferred_element_type=accumulator(batch1.dtype)
    )
    return blend(self, beta, total, alpha)


@rule(aten.mv.default)
def mv(self: Array, vec: Array) -> Array:
    """Matrix-vector product."""
    return dot_general(self, vec, ((1,), (0,))).astype(self.dtype)


@rule(aten.addmv.default, lift=_SCALARS)
def addmv(self: Array, mat: Array, vec: Array, *, beta: Scalar = 1, alpha: Scalar = 1) -> Array:
    """``beta * self + alpha * mat @ vec``."""
    return blend(self, beta, dot_general(mat, vec, ((1,), (0,))), alpha)


@rule(aten.dot.default)
def dot(self: Array, tensor: Array) -> Array:
    """Sum of products of two vectors."""
    return dot_general(self, tensor, ((0,), (0,))).astype(self.dtype)


@rule(aten.vdot.default)
def vdot(self: Array, other: Array) -> Array:
    """``dot`` with the first vector conjugated."""
    return dot(jnp.conj(self), other)


@rule(aten.addr.default, lift=_SCALARS)
def addr(self: Array, vec1: Array, vec2: Array, *, beta: Scalar = 1, alpha: Scalar = 1) -> Array:
    """``beta * self + alpha * outer(vec1, vec2)``, in the promoted dtype of the three."""
    dtype = jnp.promote_types(self.dtype, jnp.promote_types(vec1.dtype, vec2.dtype))
    wide = dtype if dtype != np.bool_ else np.dtype(np.bool_)
    outer = vec1.astype(wide)[:, None] * vec2.astype(wide)[None, :]
    if dtype == np.bool_:
        kept = self & jnp.asarray(beta).astype(bool)
        return kept | (outer & jnp.asarray(alpha).astype(bool))
    return blend(jnp.broadcast_to(self, outer.shape).astype(dtype), beta, outer, alpha)


@rule(aten.linear.default)
def linear(
    input: Array, weight: Array, bias: Array | None = None, *, turned: bool = False
) -> Array:
    """``input @ weight.T + bias`` over the last dimension of ``input``; ``turned``: ``weight.T`` is given."""
    over = (input.ndim - 1,), (weight.ndim - 1 - turned,)
    if bias is None:
        total = dot_general(input, weight, over, result=_matrix_dtype(input, weight))
    else:  # which is added before the sum is rounded, as in addmm
        total = dot_general(input, weight, over)
        total = total + bias.astype(total.dtype)
    return total.astype(input.dtype)


def _computed_once(gradient: Array, inputs: int) -> Array:
    """A value that two products read: the gradient of the result of a linear layer with so many ``inputs``.

    libtpu would compute what it is made of in each of them again. In a gated MLP that is the gradient of the
    activation, and 4 % of the cycles of a training step with 70 billion parameters (docs/plan.md). That of a
    vocabulary's scores is left to libtpu, because it would be the largest value of a small model.
    """
    current = target.current()
    if current is None or current.platform != "tpu" or gradient.shape[-1] > _WIDEST * inputs:
        return gradient
    return lax.optimization_barrier(gradient)


@rule(aten.linear_backward.default)
def linear_backward(
    self: Array,
    grad_output: Array,
    weight: Array,
    output_mask: Sequence[bool],
    *,
    turned: bool = False,
) -> tuple[Array | None, ...]:
    """Gradients of ``linear`` by input, weight and bias; the mask leaves out the first, or both others.

    With ``turned``, ``weight.T`` is given; its gradient is that of ``weight``.
    """
    lead = tuple(range(grad_output.ndim - 1))
    by_input = by_weight = by_bias = None
    result = _matrix_dtype(grad_output, weight)
    if output_mask[0] and output_mask[1]:
        grad_output = _computed_once(grad_output, self.shape[-1])
    if output_mask[0]:
        over = (grad_output.ndim - 1,), (int(turned),)
        by_input = dot_general(grad_output, weight, over, result=result)
    if output_mask[1] or output_mask[2]:
        by_weight = dot_general(grad_output, self, (lead, lead), result=result)
        by_bias = jnp.sum(grad_output, axis=lead)
    return by_input, by_weight, by_bias


@rule(aten.matmul.default)
def matmul(self: Array, other: Array) -> Array:
    """``torch.matmul`` with its broadcasting over batch dimensions."""
    wide = accumulator(self.dtype)
    return jnp.matmul(self, other, preferred_element_type=wide).astype(self.dtype)


@rule(aten._trilinear.default)
def trilinear(
    i1: Array,
    i2: Array,
    i3: Array,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Array:
    """Product of three tensors, each given new dimensions of size 1, summed over ``sumdim``."""
    operands = [
        jnp.expand_dims(x, tuple(d)) for x, d in ((i1, expand1), (i2, expand2), (i3, expand3))
    ]
    letters = [chr(ord("a") + d) for d in range(operands[0].ndim)]
    full = np.broadcast_shapes(*(x.shape for x in operands))
    terms, kept = [], []
    for x in operands:
        # A broadcast dimension is left out of the term, which makes the sum a real contraction.
        gone = tuple(d for d in range(x.ndim) if x.shape[d] == 1)
        kept.append(jnp.squeeze(x, gone))
        terms.append("".join(letters[d] for d in range(x.ndim) if d not in gone))
    out = "".join(letters[d] for d in range(len(full)) if d not in sumdim and full[d] != 1)
    total = jnp.einsum(
        ",".join(terms) + "->" + out, *kept, preferred_element_type=accumulator(i1.dtype)
    )
    return total.reshape([full[d] for d in range(len(full)) if d not in sumdim]).astype(i1.dtype)
