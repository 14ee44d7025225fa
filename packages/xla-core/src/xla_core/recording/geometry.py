"""Where a chain of views looks: strides and offset, as a CPU tensor seen through the same views has them."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from xla_core.recording.storage import Storage, View, chain
from xla_core.support import caches

MSG_PARTS_OF_CONJUGATE: Final = (
    "{view} of a conjugated or negated tensor has no strides over the storage, because an xla tensor "
    "conjugates when it is read; call .clone() before it"
)

_CONJUGATE: Final = torch.ops.aten._conj.default
_NEGATIVE: Final = torch.ops.aten._neg_view.default


class Geometry(NamedTuple):
    """Strides and offset, in elements of the view's dtype, over the elements of a contiguous base.

    The base is what the first ``skipped`` views of the chain show; 0: the storage. The elements that are
    found there are conjugated or negated where ``conjugate`` or ``negative`` says so.
    """

    skipped: int
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool


_known: caches.Bounded[object, Geometry] = caches.Bounded("geometries of views")


def geometry(s: Storage, v: View | None, same_values: bool = False) -> Geometry:
    """Where ``v`` looks on ``s``.

    A view that no strides describe (a reshaped transpose), where the CPU has a copy, begins a new base.
    With ``same_values`` so does one that shows other values than lie there: another dtype, conjugates.
    Raises RuntimeError for parts of conjugates, which have no strides otherwise.
    """
    views = chain(v)
    key = (s.meta, same_values, *[(one.plan.number, *one.tail) for one in views])
    place = _known.get(key)
    if place is None:
        place = _known.keep(key, _walk(s, views, same_values))
    return place


def _walk(s: Storage, views: list[View], same_values: bool) -> Geometry:
    seen = torch.empty(s.meta.shape, dtype=s.meta.dtype, device="meta")
    skipped = 0
    conjugate = negative = False
    for count, one in enumerate(views, 1):
        overload = one.plan.overload
        turned = overload is _CONJUGATE or overload is _NEGATIVE
        if turned and not same_values:
            conjugate ^= overload is _CONJUGATE
            negative ^= overload is _NEGATIVE
            continue
        changed = turned or one.meta.dtype != seen.dtype
        if changed and (conjugate or negative):
            raise RuntimeError(MSG_PARTS_OF_CONJUGATE.format(view=one.plan.name))
        then = None if changed and same_values else _shown(seen, one)
        if then is None:
            then = torch.empty(one.meta.shape, dtype=one.meta.dtype, device="meta")
            skipped, conjugate, negative = count, False, False
        seen = then
    return Geometry(skipped, seen.stride(), seen.storage_offset(), conjugate, negative)


def _shown(seen: torch.Tensor, view: View) -> torch.Tensor | None:
    """What a view shows of a meta tensor; None if PyTorch cannot look at it so without a copy."""
    try:
        return view.plan.overload(seen, *view.args)
    except RuntimeError:
        return None
