"""Converts symbolic sizes of PyTorch to symbolic dimensions of jax, with the same bounds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Final

import jax
import jax.export
import sympy
import torch
from torch.utils._sympy import functions as torch_functions
from torch.utils._sympy.value_ranges import ValueRanges

from xla_core.jax_bridge.traced_values import Size
from xla_core.operators.tensor_meta import TensorMeta, tensor_meta

MSG_EXPRESSION: Final = (
    "the size {size} has no form in StableHLO (its {part} is not one of + - * // % max min); export "
    "with fixed sizes there, or with other dynamic_shapes"
)
MSG_DATA_DEPENDENT: Final = (
    "the size {size} depends on a tensor's values, but the sizes in a StableHLO program must follow from its "
    "arguments' sizes. It comes from an operator such as nonzero() or item(); remove that from the exported model"
)

# PyTorch's bounds of this size or more mean that there is no bound. The default lower bound of jax is 1.
_LARGEST: Final = 2**31 - 1

_OPERATIONS: Final[Mapping[object, Callable[..., object]]] = {
    sympy.Add: lambda *items: reduce(operator.add, items),
    sympy.Mul: lambda *items: reduce(operator.mul, items),
    sympy.Pow: operator.pow,
    sympy.Max: lambda *items: reduce(jax.core.max_dim, items),
    sympy.Min: lambda *items: reduce(jax.core.min_dim, items),
    torch_functions.FloorDiv: operator.floordiv,
    torch_functions.CleanDiv: operator.floordiv,
    torch_functions.PowByNatural: operator.pow,
    torch_functions.Identity: lambda item: item,
    torch_functions.Mod: operator.mod,
    torch_functions.PythonMod: operator.mod,
    torch_functions.Max: lambda *items: reduce(jax.core.max_dim, items),
    torch_functions.Min: lambda *items: reduce(jax.core.min_dim, items),
}


class Symbols:
    """The symbols of one exported program, as symbolic dimensions of jax in one scope."""

    def __init__(self, ranges: Mapping[sympy.Symbol, ValueRanges[sympy.Expr]]) -> None:
        named = [(s, bounds) for s, bounds in ranges.items() if isinstance(s, sympy.Symbol)]
        constraints = [c for s, bounds in named for c in _constraints(s, bounds)]
        self._scope = jax.export.SymbolicScope(constraints)
        self._known: dict[sympy.Symbol, object] = {}

    def dimension(self, size: int | torch.SymInt) -> Size:
        """A size as a dimension of jax: an int, or an expression of symbols.

        Raises ValueError for an expression that jax does not have, and for a size that depends on values.
        """
        if not isinstance(size, torch.SymInt):
            return int(size)
        return self._convert(size.node.expr, size)

    def meta(self, tensor: torch.Tensor) -> TensorMeta:
        """The shape and dtype of a tensor, with jax's dimensions in place of symbols."""
        shape = tuple(map(self.dimension, tensor.shape))
        if all(isinstance(size, int) for size in shape):
            return tensor_meta(shape, tensor.dtype)
        return TensorMeta(shape, tensor.dtype, 0)  # not interned, as no trace compares it

    def _convert(self, expression: sympy.Expr, size: torch.SymInt) -> Size:
        if expression.is_Integer:
            return int(expression)
        if expression.is_Symbol:
            return self._symbol(expression, size)
        apply = _OPERATIONS.get(expression.func)
        if apply is None:
            text = MSG_EXPRESSION.format(size=size, part=expression.func.__name__)
            raise ValueError(text)
        return apply(*(self._convert(part, size) for part in expression.args))

    def _symbol(self, symbol: sympy.Symbol, size: torch.SymInt) -> Size:
        if symbol.name.startswith(
            "u"
        ):  # torch 2.13: sizes that depend on values are called u0, u1, ...
            raise ValueError(MSG_DATA_DEPENDENT.format(size=size))
        if symbol not in self._known:
            (dimension,) = jax.export.symbolic_shape(symbol.name, scope=self._scope)
            self._known[symbol] = dimension
        return self._known[symbol]


def _constraints(symbol: sympy.Symbol, bounds: ValueRanges[object]) -> list[str]:
    constraints = []
    if bounds.lower.is_Integer and int(bounds.lower) > 1:
        constraints.append(f"{symbol.name} >= {int(bounds.lower)}")
    if bounds.upper.is_Integer and int(bounds.upper) < _LARGEST:
        constraints.append(f"{symbol.name} <= {int(bounds.upper)}")
    return constraints


def is_dynamic(size: object) -> bool:
    """Whether a size of an example tensor is symbolic."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_Integer
