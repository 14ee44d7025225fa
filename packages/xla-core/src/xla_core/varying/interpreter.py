"""Runs what jax traced with symbolic sizes on padded arrays of fixed shapes, one primitive after the other.

A rule says how a varying length passes through a primitive (``padding_rule`` registers it). Without a rule for a
primitive there is no program for a bound. The results of every rule are compared with the sizes that jax promised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np
from jax import lax

from xla_core.jax_bridge import symbolic_sizes
from xla_core.jax_bridge.jax_private import Equation
from xla_core.jax_bridge.symbolic_sizes import is_symbolic
from xla_core.jax_bridge.traced_values import JaxObject, TracedValue
from xla_core.varying.padded import (
    Dim,
    Frame,
    NotCoveredError,
    Padded,
    Value,
    as_padded,
    dim_of,
    unwrapped,
)

PaddingRule: TypeAlias = Callable[[Frame, Equation, list[Padded]], Sequence[Padded]]

_RULES: Final[dict[str, PaddingRule]] = {}
# Calls of functions, by the name of the parameter that has the function.
_CALLS: Final = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}

MSG_NO_RULE: Final = "a varying length cannot pass {primitive}"
MSG_SIZES: Final = "{primitive} gave sizes {given} where {promised} was promised"
MSG_SHAPE: Final = "{primitive} gave an array of shape {given} for dimensions {dims}"


def padding_rule(*names: str) -> Callable[[PaddingRule], PaddingRule]:
    """Register how a varying length passes through the primitives ``names``.

    The rule takes the ``Frame``, the equation and its operands, and returns the results.
    """

    def register(rule: PaddingRule) -> PaddingRule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def covered() -> frozenset[str]:
    """The names of all primitives that varying lengths can pass through."""
    return frozenset(_RULES) | frozenset(_CALLS)


def run(
    frame: Frame, jaxpr: JaxObject, consts: Sequence[TracedValue], values: Sequence[Value]
) -> list[Value]:
    """The results of a jaxpr with symbolic sizes; varying values are ``Padded``, others plain arrays.

    Raises NotCoveredError if a primitive with a varying operand or result has no rule.
    """
    known: dict[JaxObject, Value] = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, values, strict=True))

    def read(variable: JaxObject) -> Value:
        if hasattr(variable, "val"):
            return np.asarray(variable.val, variable.aval.dtype)
        return known[variable]

    for equation in jaxpr.eqns:
        given = list(map(read, equation.invars))
        results = _equation(frame, equation, given)
        known.update(zip(equation.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _equation(frame: Frame, equation: Equation, given: list[Value]) -> Sequence[Value]:
    name = equation.primitive.name
    if not any(isinstance(value, Padded) for value in given) and not _has_symbols(equation):
        return _bound(equation, given)
    if name in _CALLS:
        inner = equation.params[_CALLS[name]]
        closed = getattr(inner, "jaxpr", inner)
        return run(frame, closed, getattr(inner, "consts", ()), given)
    rule = _RULES.get(name)
    if rule is None:
        raise NotCoveredError(MSG_NO_RULE.format(primitive=name))
    results = rule(frame, equation, list(map(as_padded, given)))
    for result, variable in zip(results, equation.outvars, strict=True):
        _check(frame, name, result, variable.aval)
    return list(map(unwrapped, results))


def _bound(equation: Equation, given: list[TracedValue]) -> Sequence[TracedValue]:
    results = symbolic_sizes.bind_again(equation, given)
    return results if equation.primitive.multiple_results else [results]


def bind(equation: Equation, *arrays: TracedValue, **changed: object) -> TracedValue:
    """The equation's primitive applied to other arrays, with ``changed`` among its parameters."""
    return equation.primitive.bind(*arrays, **{**equation.params, **changed})


def _check(frame: Frame, name: str, result: Padded, aval: JaxObject) -> None:
    if tuple(result.sizes) != tuple(aval.shape):
        raise NotCoveredError(
            MSG_SIZES.format(primitive=name, given=result.sizes, promised=aval.shape)
        )
    if tuple(result.array.shape) != frame.shape(result.dims):
        raise NotCoveredError(
            MSG_SHAPE.format(primitive=name, given=result.array.shape, dims=result.dims)
        )


@padding_rule("cond")
def cond(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """One of several functions. All of them return results whose elements lie side by side."""
    index, *operands = values
    dims = [tuple(map(dim_of, variable.aval.shape)) for variable in equation.outvars]

    def branch(closed: JaxObject) -> Callable[..., list[TracedValue]]:
        def function(*arrays: TracedValue) -> list[TracedValue]:
            given = [unwrapped(v.with_array(a)) for v, a in zip(operands, arrays, strict=True)]
            within = frame.inside()
            results = run(within, closed.jaxpr, closed.consts, given)
            return [laid(within, as_padded(r), d).array for r, d in zip(results, dims, strict=True)]

        return function

    branches = list(map(branch, equation.params["branches"]))
    arrays = lax.switch(index.array, branches, *(value.array for value in operands))
    return [Padded(array, d) for array, d in zip(arrays, dims, strict=True)]


def laid(frame: Frame, value: Padded, dims: Sequence[Dim]) -> Padded:
    """The same value in the layout of ``dims``."""
    for axis, dim in enumerate(dims):
        value = frame.laid_out(value, axis, dim)
    return value


def _has_symbols(equation: Equation) -> bool:
    variables = (*equation.invars, *equation.outvars)
    sizes = (size for v in variables for size in getattr(v.aval, "shape", ()))
    return any(map(is_symbolic, sizes)) or _mentions(equation.params.values())


def _mentions(values: Iterable[object]) -> bool:
    for value in values:
        if is_symbolic(value):
            return True
        if isinstance(value, (tuple, list)):
            if _mentions(value):
                return True
        else:
            jaxpr = getattr(value, "jaxpr", value)
            if any(map(_has_symbols, getattr(jaxpr, "eqns", ()))):
                return True
    return False
