"""The ``_foreach_`` operators: the rule of the single-tensor operator on each element of a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from torch._ops import OpOverload

from xla_core.lowering.rules.common import (
    convert,
    find_overload,
    opmath,
    opmath_dtype,
    output_dtype,
    present,
    where,
)
from xla_core.lowering.rules.reductions import sum_over
from xla_core.operators.lowering_registry import RuleContext, rule, rule_of
from xla_core.operators.run_rule import run_rule
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands

UNARY: Final = (
    "abs", "acos", "asin", "atan", "ceil", "clone", "cos", "cosh", "erf", "erfc", "exp", "expm1",
    "floor", "frac", "lgamma", "log", "log10", "log1p", "log2", "max", "neg", "reciprocal",
    "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "tan", "tanh", "trunc", "zero",
)  # fmt: skip

# The single-tensor overload that each overload of a list operator applies to every element.
BINARY: Final[dict[str, str]] = {
    "add.List": "add.Tensor",
    "add.Scalar": "add.Scalar",
    "add.ScalarList": "add.Scalar",
    "add.Tensor": "add.Tensor",
    "sub.List": "sub.Tensor",
    "sub.Scalar": "sub.Scalar",
    "sub.ScalarList": "sub.Scalar",
    "mul.List": "mul.Tensor",
    "mul.Scalar": "mul.Scalar",
    "mul.ScalarList": "mul.Scalar",
    "mul.Tensor": "mul.Tensor",
    "div.List": "div.Tensor",
    "div.Scalar": "div.Scalar",
    "div.ScalarList": "div.Scalar",
    "div.Tensor": "div.Tensor",
    "clamp_min.List": "maximum",
    "clamp_min.Scalar": "clamp_min",
    "clamp_min.ScalarList": "clamp_min",
    "clamp_max.List": "minimum",
    "clamp_max.Scalar": "clamp_max",
    "clamp_max.ScalarList": "clamp_max",
    "maximum.List": "maximum",
    "maximum.Scalar": "clamp_min",
    "maximum.ScalarList": "clamp_min",
    "minimum.List": "minimum",
    "minimum.Scalar": "clamp_max",
    "minimum.ScalarList": "clamp_max",
    "pow.List": "pow.Tensor_Tensor",
    "pow.Scalar": "pow.Tensor_Scalar",
    "pow.ScalarList": "pow.Tensor_Scalar",
    "pow.ScalarAndTensor": "pow.Scalar",
    "lerp.List": "lerp.Tensor",
    "lerp.Scalar": "lerp.Scalar",
    "lerp.ScalarList": "lerp.Scalar",
    "copy": "copy",
    "mm": "mm",
}

# Exponents stay constants: the common ones have cheap special cases.
LIFTED: Final = ("scalar", "scalars", "value", "alpha", "weight")


def _element(value: object, index: int) -> object:
    return value[index] if isinstance(value, (list, tuple)) else value


def _apply(
    context: RuleContext, single: OpOverload, args: Operands, kwargs: NamedOperands
) -> list[Array]:
    """The rule of ``single`` on the i-th elements of all lists, for each i."""
    element_rule = rule_of(single)
    results = []
    for index, output in enumerate(context.outputs):
        element_args = tuple(_element(value, index) for value in args)
        metas = tuple(_element(meta, index) for meta in context.args)
        results += run_rule(element_rule, element_args, kwargs, metas, (output,))
    return results


def _foreach(single: OpOverload) -> Callable[..., list[Array]]:
    def each(context: RuleContext, *args: object, **kwargs: object) -> list[Array]:
        return _apply(context, single, args, kwargs)

    return each


def _register() -> None:
    table = {name: name for name in UNARY} | BINARY
    for name, single_name in table.items():
        single = find_overload(single_name)
        if single is not None:
            rule(*present(f"_foreach_{name}"), lift=LIFTED, context=True)(_foreach(single))


_register()


def _fused_multiply(name: str) -> Callable[..., list[Array]]:
    single = find_overload(name)

    def each(
        context: RuleContext, self: Array, tensor1: Array, tensor2: Array, value: Operand = 1
    ) -> list[Array]:
        count = len(context.outputs)
        several = isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) == 1
        values = [value[i] for i in range(count)] if several else [value] * count
        element_rule = rule_of(single)
        return [
            run_rule(
                element_rule,
                (self[i], tensor1[i], tensor2[i]),
                {"value": values[i]},
                tuple(metas[i] for metas in context.args[:3]),
                (context.outputs[i],),
            )[0]
            for i in range(count)
        ]

    return each


def _register_fused_multiply() -> None:
    for name in ("addcmul", "addcdiv"):
        kinds = (f"_foreach_{name}.{kind}" for kind in ("Scalar", "ScalarList", "Tensor"))
        rule(*present(*kinds), lift=LIFTED, context=True)(_fused_multiply(name))


_register_fused_multiply()


@rule(*present("_foreach_norm.Scalar"), context=True)
def foreach_norm(
    context: RuleContext, self: list[Array], ord: object = 2, dtype: object = None
) -> list[Array]:
    """The vector norm of each tensor."""
    single = rule_of(find_overload("linalg_vector_norm"))
    return [
        run_rule(single, (array, ord), {}, (meta, ord), (output,))[0]
        for array, meta, output in zip(self, context.args[0], context.outputs, strict=True)
    ]


@rule(*present("_foreach_powsum.Scalar"), context=True)
def foreach_powsum(
    context: RuleContext, self: list[Array], ord: object = 2, dtype: object = None
) -> list[Array]:
    """The sum of ``abs(x) ** ord`` of each tensor."""
    results = []
    for index, array in enumerate(self):
        size = lax.abs(opmath(convert(array, output_dtype(context, index))))
        raised = size * size if ord == 2 else lax.pow(size, size.dtype.type(ord))
        results.append(sum_over(raised, tuple(range(raised.ndim))))
    return results


@rule(*present("_amp_foreach_non_finite_check_and_unscale"))
def amp_unscale(self: list[Array], found_inf: Array, inv_scale: Array) -> list[Array]:
    """Each gradient times ``inv_scale``; then ``found_inf``, 1 if one was not finite."""
    scale = inv_scale.reshape(())
    outputs = [opmath(array) * scale.astype(opmath_dtype(array.dtype)) for array in self]
    for array in self:
        infinite = ~jnp.all(lax.is_finite(array))
        found_inf = jnp.maximum(found_inf, infinite.astype(found_inf.dtype))
    return [*outputs, found_inf]


@rule(*present("_amp_update_scale"))
def amp_update_scale(
    self: Array,
    growth_tracker: Array,
    found_inf: Array,
    scale_growth_factor: float,
    scale_backoff_factor: float,
    growth_interval: int,
) -> tuple[Array, Array]:
    """The loss scale after a step: backed off after an infinity, grown after enough good steps."""
    failed = (found_inf != 0).reshape(growth_tracker.shape)
    successes = growth_tracker + 1
    due = successes == growth_interval
    grown = (self.astype(np.float64) * scale_growth_factor).astype(self.dtype)
    grown = where(lax.is_finite(grown) & due.reshape(self.shape), grown, self)
    backed_off = (self.astype(np.float64) * scale_backoff_factor).astype(self.dtype)
    scale = where(failed.reshape(self.shape), backed_off, grown)
    return scale, where(failed | due, 0, successes)
