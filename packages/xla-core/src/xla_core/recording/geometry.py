"""Strides and offset of a chain of views: those that a CPU tensor seen through the same views would have."""

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

    The base is what the first ``skipped`` views of the chain show; with 0 it is the storage. ``conjugate`` and
    ``negative`` say that the view shows these elements conjugated or negated.
    """

    skipped: int
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool


_known: caches.Bounded[object, Geometry] = caches.Bounded("geometries of views")


def geometry(s: Storage, v: View | None, same_values: bool = False) -> Geometry:
    """The strides and offset with which ``v`` looks at ``s``.

    A view that no strides can describe (a reshaped transpose, which the CPU would copy) begins a new base.
    With ``same_values``, so does a view that changes values: another dtype, a conjugate.
    Without it, raises RuntimeError for parts of conjugates, which have no strides.
    """
    views = chain(v)
    key = (s.meta, same_values, *[(one.plan.number, *one.tail) for one in views])
    place = _known.get(key)
    if place is None:
        place = _known.keep(key, _walk(s, views, same_values))
    return place


def _walk(s: Storage, views: list[View], same_values: bool) -> Geometry:
    seen = torch.empty(s.meta.shape, dtype=s.meta.dtype, device="meta")  # shape and strides so far
    skipped = 0
    conjugate = negative = False
    for count, one in enumerate(views, 1):
        overload = one.plan.overload
        changes_sign = overload is _CONJUGATE or overload is _NEGATIVE
        if changes_sign and not same_values:
            conjugate ^= overload is _CONJUGATE
            negative ^= overload is _NEGATIVE
            continue
        changes_values = changes_sign or one.meta.dtype != seen.dtype
        if changes_values and (conjugate or negative):
            raise RuntimeError(MSG_PARTS_OF_CONJUGATE.format(view=one.plan.name))
        shown = None if changes_values and same_values else _shown(seen, one)
        if shown is None:  # a new base
            shown = torch.empty(one.meta.shape, dtype=one.meta.dtype, device="meta")
            skipped, conjugate, negative = count, False, False
        seen = shown
    return Geometry(skipped, seen.stride(), seen.storage_offset(), conjugate, negative)


def _shown(seen: torch.Tensor, view: View) -> torch.Tensor | None:
    """The view of a meta tensor; None if PyTorch would have to copy."""
    try:
        return view.plan.overload(seen, *view.args)
    except RuntimeError:
        return None
