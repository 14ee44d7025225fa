"""In partitioned programs, lowers matrix products without the transposes around them.

A product by a transposed weight and its gradient, a product by the weight itself, need the weight in two forms. A
weight that is split over the devices must be gathered for both, and as two values it would be gathered twice.
A product over other dimensions of the weight gives the same result, so one gathered value serves both.

The gradient of the weight is a transposed product. Devices sum the product before the transpose, so the compiler
cannot merge the two, and every reader of the gradient would transpose it. Swapping the factors
gives the transposed product directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import jax
import jax.numpy as jnp

from xla_core.lowering.evaluate import Lifted
from xla_core.lowering.repeat_graph import OpInstance
from xla_core.lowering.source_scopes import scope_name
from xla_core.lowering.spmd_bmm_scope import UnmergedScope
from xla_core.operators.lowering_registry import Rule
from xla_core.operators.run_rule import conform, run_rule
from xla_core.operators.tensor_meta import tensor_meta
from xla_core.recording.entry import Operation


class PartitionedScope(UnmergedScope):
    """An ``UnmergedScope`` that transposes a matrix only for readers that are not products.

    ``transposed`` maps the number of a transposed matrix to the matrix itself. ``waiting`` holds products that have
    not been read yet: if a transpose reads one first, its transpose is computed instead.
    """

    def __init__(self, lazy: Mapping[int, Operation], lifted: Lifted) -> None:
        super().__init__(lazy, lifted)
        self.transposed: dict[int, jax.Array] = {}
        self.forms["transposed"] = self.transposed
        self.waiting: dict[int, OpInstance] = {}

    def __missing__(self, vid: int) -> jax.Array:
        part = self.waiting.pop(vid, None)
        if part is not None:
            matrix = self[vid] = _product(self, part)
            return matrix
        transpose = self.transposed.get(vid)
        if transpose is None:
            return super().__missing__(vid)
        matrix = self[vid] = jnp.swapaxes(transpose, 0, 1)
        return matrix

    def compute(self, part: OpInstance) -> None:
        """Evaluate one operation and store its results."""
        plan = part.entry.plan
        name = "" if plan.is_put else plan.name
        if name in _PRODUCTS:
            self.waiting[part.results()[0]] = part
        elif name in _WEIGHTS:
            if not _linear(self, part, _WEIGHTS[name]):
                super().compute(part)
        elif name not in _TRANSPOSES or not _transpose(self, part):
            super().compute(part)

    def transpose_of(self, vid: int) -> jax.Array | None:
        """The transpose of a matrix if it is at hand, or if a waiting product can be computed transposed."""
        part = self.waiting.get(self.materialize(vid))
        if part is not None and part.entry.plan.name == MM:
            del self.waiting[vid]
            self.transposed[vid] = _product(self, part, swapped=True)
        return self.transposed.get(vid)


def _transpose(scope: PartitionedScope, part: OpInstance) -> bool:
    source, *dimensions = part.entry.args
    (vid,) = part.results()
    if len(source.meta.shape) != 2 or len({d % 2 for d in dimensions or (0, 1)}) != 2:
        return False
    transpose = scope.transpose_of(source.vid)
    if transpose is not None:
        scope[vid] = transpose
    else:
        scope.transposed[vid] = scope[source.vid]
    return True


def _linear(scope: PartitionedScope, part: OpInstance, position: int) -> bool:
    """Compute a linear layer or its gradients, if the weight at this position is at hand transposed."""
    args, kwargs = part.arguments()
    weight = scope.transposed.get(scope.materialize(args[position].vid))
    if weight is None:
        return False
    values = tuple(weight if n == position else scope.value(a) for n, a in enumerate(args))
    named = {name: scope.value(a) for name, a in kwargs.items()}
    rule = part.entry.plan.rule
    assert isinstance(rule, Rule)
    with jax.named_scope(scope_name(part.entry)):
        results = run_rule(rule, values, {**named, "turned": True}, (), part.metas())
    scope.update(zip(part.results(), results, strict=True))
    return True


def _product(scope: PartitionedScope, part: OpInstance, swapped: bool = False) -> jax.Array:
    """The result of ``mm`` or ``addmm``; with ``swapped``, the transposed result of ``mm``."""
    args, kwargs = part.arguments()
    *added, left, right = args
    turned = tuple(scope.materialize(ref.vid) in scope.transposed for ref in (left, right))
    factors = [scope.transposed.get(ref.vid, ref) for ref in (left, right)]
    plan, (meta,) = part.entry.plan, part.metas()
    assert isinstance(plan.rule, Rule) and meta is not None
    if swapped:  # (a b)' is b' a'
        factors.reverse()
        turned = not turned[1], not turned[0]
        meta = tensor_meta(meta.shape[::-1], meta.dtype)
    named = {name: scope.value(a) for name, a in kwargs.items()}
    values = list(map(scope.value, (*added, *factors)))
    with jax.named_scope(scope_name(part.entry)):
        return conform(plan.rule.function(*values, **named, turned=turned), meta, plan.name)


MM: Final = "aten.mm.default"
_PRODUCTS: Final = frozenset({MM, "aten.addmm.default"})
_WEIGHTS: Final = {"aten.linear.default": 1, "aten.linear_backward.default": 2}
"""The positions of weights among the arguments of linear layers and their gradients."""
_TRANSPOSES: Final = frozenset({"aten.t.default", "aten.transpose.int"})
