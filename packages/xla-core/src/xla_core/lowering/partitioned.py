"""What is lowered otherwise where a program is partitioned: products read transposed factors as they lie.

PyTorch's linear layer multiplies by a transposed weight, its gradient by the weight itself. A weight
that is split over the devices has to be whole for both: as two values it would be gathered twice.
A product over other dimensions of the weight is the same, and one gathered value serves all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp

from xla_core.lowering.batch_dims import UnmergedScope
from xla_core.lowering.driver import conform
from xla_core.lowering.evaluate import Lifted
from xla_core.lowering.nodes import Part
from xla_core.trace import Entry
from xla_core.where import scope_name


class PartitionedScope(UnmergedScope):
    """An ``UnmergedScope`` in which transposed matrices are made only for those who are no products.

    ``turned`` holds the matrices by the number of their transpose.
    """

    def __init__(self, lazy: Mapping[int, Entry], lifted: Lifted) -> None:
        super().__init__(lazy, lifted)
        self.turned: dict[int, Any] = {}

    def __missing__(self, vid: int) -> Any:
        found = self.turned.get(vid)
        if found is None:
            return super().__missing__(vid)
        transposed = self[vid] = jnp.swapaxes(found, 0, 1)
        return transposed

    def compute(self, part: Part) -> None:
        """Run one operation and keep its results."""
        plan = part.entry.plan
        assert plan is not None
        known = None if plan.is_put else _KNOWN.get(plan.name)
        if known is None or not known(self, part):
            super().compute(part)


def _transpose(scope: PartitionedScope, part: Part) -> bool:
    source, *dimensions = part.entry.args
    (vid,) = part.results()
    if len(source.meta.shape) != 2 or len({d % 2 for d in dimensions or (0, 1)}) != 2:
        return False
    back = scope.turned.get(source.vid)
    if back is not None:
        scope[vid] = back
    else:
        scope.turned[vid] = scope[source.vid]
    return True


def _product(scope: PartitionedScope, part: Part) -> bool:
    args, kwargs = part.arguments()
    *added, left, right = args
    turned = left.vid in scope.turned, right.vid in scope.turned
    if not any(turned):
        return False
    plan, (meta,), (vid,) = part.entry.plan, part.metas(), part.results()
    assert plan is not None and plan.rule is not None and meta is not None
    factors = [scope.turned.get(ref.vid, ref) for ref in (left, right)]
    named = {name: scope.value(a) for name, a in kwargs.items()}
    with jax.named_scope(scope_name(part.entry)):
        total = plan.rule.function(*map(scope.value, (*added, *factors)), **named, turned=turned)
    scope[vid] = conform(total, meta, plan.name)
    return True


_KNOWN: Final[Mapping[str, Callable[[PartitionedScope, Part], bool]]] = {
    "aten.t.default": _transpose,
    "aten.transpose.int": _transpose,
    "aten.mm.default": _product,
    "aten.addmm.default": _product,
}
