"""In partitioned programs, keeps batch dimensions separate that PyTorch merges for ``bmm``.

``matmul`` of four-dimensional tensors reshapes batch and heads into one dimension, multiplies, and
separates them again. A value that is split over the heads cannot remain split in between: devices would
exchange the whole value twice for each product. Without the reshapes, the product is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import jax.numpy as jnp
from jax import Array

from xla_core.lowering.evaluate import PLAIN, Exported, Lifted, Scope
from xla_core.lowering.repeat_graph import OpInstance
from xla_core.recording.entry import Operation
from xla_core.recording.step_key import Ref


class UnmergedScope(Scope):
    """A scope in which batch dimensions are not merged as long as only products use them.

    ``unmerged`` maps the number of a merged value to the array with all batch dimensions. The merged value itself
    is made when another operation reads it. ``forms`` are all such ways to hold a value, by name.
    """

    def __init__(self, lazy: Mapping[int, Operation], lifted: Lifted) -> None:
        super().__init__(lazy, lifted)
        self.unmerged: dict[int, Array] = {}
        self.forms = {"unmerged": self.unmerged}
        self._materialized: set[int] = set()

    def materialize(self, vid: int) -> int:
        """Compute value ``vid``, in any form, if it is lazy; returns ``vid``."""
        entry = self.lazy.get(vid)
        if entry is not None and vid not in self._materialized and vid not in self:
            self._materialized.add(vid)
            self.compute(OpInstance(entry))
        return vid

    def export_value(self, vid: int) -> Exported:
        """A value for another scope, in the form in which this scope holds it."""
        self.materialize(vid)
        for form, kept in self.forms.items():
            if vid in kept:
                return kept[vid], form
        return super().export_value(vid)

    def import_value(self, vid: int, exported: Exported) -> None:
        """Store a value in the form in which another scope holds it."""
        array, form = exported
        if form == PLAIN:
            super().import_value(vid, exported)
        else:
            self._materialized.add(vid)  # even if it is lazy, it need not be computed
            self.forms[form][vid] = array

    def __missing__(self, vid: int) -> Array:
        unmerged = self.unmerged.get(vid)
        if unmerged is None:
            return super().__missing__(vid)
        merged = self[vid] = unmerged.reshape(-1, *unmerged.shape[-2:])
        return merged

    def compute(self, part: OpInstance) -> None:
        """Evaluate one operation and store its results."""
        plan = part.entry.plan
        compute_unmerged = None if plan.is_put else _UNMERGED.get(plan.name)
        if compute_unmerged is None or not compute_unmerged(self, part):
            super().compute(part)


# Each of these computes an operation on unmerged values, or returns False.


def _view(scope: UnmergedScope, part: OpInstance) -> bool:
    source = part.entry.args[0]
    (meta,) = part.metas()
    (vid,) = part.results()
    assert isinstance(source, Ref) and meta is not None
    unmerged = scope.unmerged.get(scope.materialize(source.vid))
    if unmerged is not None and unmerged.shape == meta.shape:  # separates the dimensions again
        scope[vid] = unmerged
        return True
    shape = source.meta.shape
    merged = (math.prod(shape[:-2]), *shape[-2:])
    if len(shape) > 3 and meta.shape == merged:
        scope.unmerged[vid] = scope[source.vid]
        return True
    return False


def _transpose(scope: UnmergedScope, part: OpInstance) -> bool:
    source, first, second = part.entry.args[:3]
    unmerged = scope.unmerged.get(scope.materialize(source.vid))
    if unmerged is None or {first % 3, second % 3} != {1, 2}:
        return False
    scope.unmerged[part.results()[0]] = jnp.swapaxes(unmerged, -1, -2)
    return True


def _bmm(scope: UnmergedScope, part: OpInstance) -> bool:
    left, right = (scope.unmerged.get(scope.materialize(a.vid)) for a in part.entry.args[:2])
    if left is None or right is None or left.shape[:-2] != right.shape[:-2]:
        return False
    rule = part.entry.plan.rule
    scope.unmerged[part.results()[0]] = rule.function(left, right)  # type: ignore[union-attr]
    return True


_UNMERGED: Final[Mapping[str, Callable[[UnmergedScope, OpInstance], bool]]] = {
    "aten.view.default": _view,
    "aten._unsafe_view.default": _view,
    "aten.transpose.int": _transpose,
    "aten.bmm.default": _bmm,
}
