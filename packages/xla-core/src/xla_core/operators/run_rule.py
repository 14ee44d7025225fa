"""Runs one lowering rule: promotion of operands before it, dtype and shape of results after it.

Rules stay bare because what is common to all of them happens here, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import jax.numpy as jnp
import torch
from jax import Array, lax
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from xla_core.contract.foreign_values import CoreEntry, ForeignObject
from xla_core.operators.lowering_registry import Promotion, Rule, RuleContext
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.support import caches
from xla_core.torch_bridge.dtypes import HALF_COMPLEX, numpy_dtype
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands

# Arguments that say where and how a result is stored, never what it is.
STORAGE_ARGUMENTS = frozenset(
    {"layout", "device", "pin_memory", "memory_format", "generator", "non_blocking"}
)

_HALVES: Final = (torch.float16, torch.bfloat16)
# The CPU's kernels of these take a second operand without dimensions as it is
# (``binary_kernel_reduced_floating_vec``, BinaryOpsKernel.cpp of torch 2.13).
_NUMBERS_AS_THEY_ARE: Final = frozenset(
    {
        torch.ops.aten.mul.Tensor,
        torch.ops.aten.div.Tensor,
        torch.ops.aten.div.Tensor_mode,
        torch.ops.aten.floor_divide.default,
    }
)


class LoweringError(RuntimeError):
    """A rule failed, or gave something else than the operator's meta kernel promised.

    ``plan`` is how the operator was recorded and ``entry`` where, if that is known. ``only_here`` says that
    operations like it may be computed elsewhere in the step.
    """

    plan: ForeignObject = None  # a ``Plan``, whose module imports this one
    entry: CoreEntry = None
    only_here: bool = False


_Kind = tuple[torch.dtype, bool] | type[bool] | type[int] | type[float] | type[complex]
"""What promotion looks at: of a tensor its dtype and whether it has dimensions, of a number its type."""


def _promoted_dtypes(
    promotion: Promotion, metas: tuple[object, ...]
) -> tuple[torch.dtype, torch.dtype]:
    """The dtype in which an operator computes, and the one that its operands have in common."""
    operands = tuple(
        (m.dtype, bool(m.shape)) if isinstance(m, TensorMeta) else _number_type(m)
        for m in metas
        if isinstance(m, (TensorMeta, bool, int, float, complex))
    )
    return _promoted_kinds(promotion, operands, torch.get_default_dtype())


def _number_type(number: bool | int | float | complex) -> _Kind:
    return next(kind for kind in (bool, int, float, complex) if isinstance(number, kind))


@caches.memoized("promotions of operands")
def _promoted_kinds(
    promotion: Promotion, operands: tuple[_Kind, ...], default: torch.dtype
) -> tuple[torch.dtype, torch.dtype]:
    del default  # torch's function reads it, so that it is one of what is remembered by
    examples = [
        kind(1)
        if isinstance(kind, type)
        else torch.empty((1,) * kind[1], dtype=kind[0], device="meta")
        for kind in operands
    ]
    kinds = ELEMENTWISE_TYPE_PROMOTION_KIND
    compute, _ = elementwise_dtypes(*examples, type_promotion_kind=kinds[promotion.value])
    _, common = elementwise_dtypes(*examples, type_promotion_kind=kinds.DEFAULT)
    return compute, common


def _promoted(rule: Rule, args: Operands, metas: tuple[object, ...]) -> Iterator[object]:
    """The operands, tensors and numbers in the dtype in which the operator computes."""
    compute, common = _promoted_dtypes(rule.promotion, metas)
    for position, (value, meta) in enumerate(zip(args, metas, strict=True)):
        if not isinstance(meta, (TensorMeta, bool, int, float, complex)):
            yield value
            continue
        if not isinstance(value, Array):
            value = jnp.asarray(value)
        # Beside halves, PyTorch rounds tensors of whole numbers to a half, and computes in float32 then.
        if (
            common in _HALVES
            and isinstance(meta, TensorMeta)
            and not meta.dtype.is_floating_point
            and not (position == 1 and not meta.shape and rule.overload in _NUMBERS_AS_THEY_ARE)
        ):
            value = value.astype(numpy_dtype(common))
        wanted = numpy_dtype(compute)
        # numbers of Python's have a dtype that gives way to another
        fits = value.dtype == wanted and not value.weak_type
        yield value if fits else value.astype(wanted)


def _are_bfloat16(metas: tuple[object, ...]) -> bool:
    """Whether all operands are such tensors.

    The sum, difference or product of two, computed in float32 and rounded, is the exact one rounded: float32 has
    more than twice their digits and two (Figueroa, "When is double rounding innocuous?", 1995). So one operation is
    enough.
    """
    return all(isinstance(m, TensorMeta) and m.dtype is torch.bfloat16 for m in metas)


def run_rule(
    rule: Rule,
    args: Operands,
    kwargs: NamedOperands,
    arg_metas: tuple[object, ...],
    outputs: tuple[TensorMeta | None, ...],
    key: Array | None = None,
) -> list[Operand]:
    """Apply ``rule`` and return one jax array per output, with the promised shape and dtype.

    ``args`` holds jax arrays (tensors and lifted scalars) and Python values. ``arg_metas`` mirrors
    it: a ``TensorMeta`` for a tensor, a number of the scalar's Python type for a scalar, lifted
    or not, which is what type promotion looks at. Raises LoweringError when a result's shape
    differs from its meta. An output whose meta is None (a gradient that the output mask leaves
    out) gives None.
    """
    if rule.promotion is not Promotion.NONE and not (
        rule.exact and not kwargs and _are_bfloat16(arg_metas)
    ):
        args = tuple(_promoted(rule, args, arg_metas))
    if rule.context:
        results = rule.function(RuleContext(outputs, arg_metas, key), *args, **kwargs)
    else:
        results = rule.function(*args, **kwargs)
    if not isinstance(results, (tuple, list)):
        results = (results,)
    if len(results) != len(outputs):
        raise LoweringError(
            f"the rule of {rule.overload} at {rule.where} gave {len(results)} results, not {len(outputs)}"
        )
    return [
        None if m is None else conform(r, m, rule.overload)
        for r, m in zip(results, outputs, strict=True)
    ]


def conform(result: Operand, meta: TensorMeta, culprit: Operand) -> Array:
    """``result`` in the dtype of ``meta``. Raises LoweringError when its shape is another."""
    if not isinstance(result, Array):
        result = jnp.asarray(result)
    if result.shape != meta.shape:
        raise LoweringError(
            f"{culprit}: the lowering gave shape {result.shape}, PyTorch promises {meta}"
        )
    wanted = numpy_dtype(meta.dtype)
    if meta.dtype is HALF_COMPLEX:
        parts = (
            part.astype(jnp.float16).astype(jnp.float32) for part in (result.real, result.imag)
        )
        return lax.complex(*parts)
    return result if result.dtype == wanted else result.astype(wanted)
