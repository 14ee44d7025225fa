"""The gradient of an annotated leaf tensor is split like the leaf."""

from __future__ import annotations

import weakref

import torch

from xla_core.extension_api.backends import Recorder
from xla_core.extension_api.tensors import XLATensor, storage_of, view_of
from xla_spmd.sharding.annotation import annotation_of

# The annotated tensors, as the objects that users hold: only these have a .grad. The keys are ids, because tensors
# as keys would be compared by their values.
_leaves: dict[int, weakref.ref[torch.Tensor]] = {}


def watch(tensor: torch.Tensor) -> None:
    """Split the gradient of an annotated tensor like the tensor, if it is a leaf and gets a gradient.

    Whether it gets one may be known only later: a parameter is made of a tensor that needs no gradient.
    """
    if tensor.is_leaf and id(tensor) not in _leaves:
        key = id(tensor)
        _leaves[key] = weakref.ref(tensor, lambda _: _leaves.pop(key, None))


def shardings(trace: Recorder) -> dict[int, str]:
    """The HLO shardings of the gradients that are pending in ``trace``, by value number: those of their leaves."""
    by_gradient = {}
    for leaf in [ref() for ref in list(_leaves.values())]:
        gradient = leaf.grad if leaf is not None and leaf.is_leaf else None
        if not isinstance(gradient, XLATensor) or view_of(gradient) is not None:
            continue
        storage = storage_of(gradient)
        annotation = annotation_of(leaf)
        pending = storage.is_pending_in(trace.epoch)
        if annotation is not None and pending and storage.trace is trace:
            by_gradient[storage.vid] = annotation.sharding.text
    return by_gradient
