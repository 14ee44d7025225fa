"""Keeps batch dimensions apart that PyTorch merges for ``bmm``, where a program is partitioned.

``matmul`` of four-dimensional tensors reshapes batch and heads into one dimension, multiplies and
takes them apart again. A value that is split over the heads cannot stay so in between: devices would
exchange it whole, twice for each product. The product is the same without the reshapes.
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
    """A scope in which merged batch dimensions stay apart as long as only products use them.

    ``unmerged`` holds arrays with all their batch dimensions by the number of the merged value, which
    is made when something else reads it. ``forms`` are all such ways to keep a value, by name.
    """

    def __init__(self, lazy: Mapping[int, Operation], lifted: Lifted) -> None:
        super().__init__(lazy, lifted)
        self.unmerged: dict[int, Array] = {}
        self.forms = {"unmerged": self.unmerged}
        self._met: set[int] = set()

    def materialize(self, vid: int) -> int:
        """``vid``; a lazy value of that number is there now, in whatever form."""
        entry = self.lazy.get(vid)
        if entry is not None and vid not in self._met and vid not in self:
            self._met.add(vid)
            self.compute(OpInstance(entry))
        return vid

    def export_value(self, vid: int) -> Exported:
        """A value for another scope, in the form that it has here."""
        self.materialize(vid)
        for form, kept in self.forms.items():
            if vid in kept:
                return kept[vid], form
        return super().export_value(vid)

    def import_value(self, vid: int, exported: Exported) -> None:
        """Keep a value in the form that it has in another scope."""
        array, form = exported
        if form == PLAIN:
            super().import_value(vid, exported)
        else:
            self._met.add(vid)  # lazy or not, it is there
            self.forms[form][vid] = array

    def __missing__(self, vid: int) -> Array:
        apart = self.unmerged.get(vid)
        if apart is None:
            return super().__missing__(vid)
        merged = self[vid] = apart.reshape(-1, *apart.shape[-2:])
        return merged

    def compute(self, part: OpInstance) -> None:
        """Run one operation and keep its results."""
        plan = part.entry.plan
        kept = None if plan.is_put else _KEEPS_APART.get(plan.name)
        if kept is None or not kept(self, part):
            super().compute(part)


def _view(scope: UnmergedScope, part: OpInstance) -> bool:
    source = part.entry.args[0]
    (meta,) = part.metas()
    (vid,) = part.results()
    assert isinstance(source, Ref) and meta is not None
    apart = scope.unmerged.get(scope.materialize(source.vid))
    if apart is not None and apart.shape == meta.shape:
        scope[vid] = apart
        return True
    shape = source.meta.shape
    merged = (math.prod(shape[:-2]), *shape[-2:])
    if len(shape) > 3 and meta.shape == merged:
        scope.unmerged[vid] = scope[source.vid]
        return True
    return False


def _transpose(scope: UnmergedScope, part: OpInstance) -> bool:
    source, first, second = part.entry.args[:3]
    apart = scope.unmerged.get(scope.materialize(source.vid))
    if apart is None or {first % 3, second % 3} != {1, 2}:
        return False
    scope.unmerged[part.results()[0]] = jnp.swapaxes(apart, -1, -2)
    return True


def _bmm(scope: UnmergedScope, part: OpInstance) -> bool:
    left, right = (scope.unmerged.get(scope.materialize(a.vid)) for a in part.entry.args[:2])
    if left is None or right is None or left.shape[:-2] != right.shape[:-2]:
        return False
    rule = part.entry.plan.rule
    scope.unmerged[part.results()[0]] = rule.function(left, right)  # type: ignore[union-attr]
    return True


_KEEPS_APART: Final[Mapping[str, Callable[[UnmergedScope, OpInstance], bool]]] = {
    "aten.view.default": _view,
    "aten._unsafe_view.default": _view,
    "aten.transpose.int": _transpose,
    "aten.bmm.default": _bmm,
}
