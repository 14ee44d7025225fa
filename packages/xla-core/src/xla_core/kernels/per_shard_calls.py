"""Calls of kernels over a mesh of devices, each of which computes its own parts.

The forward and the backward pass are split separately. Between them autograd keeps whole tensors, since a step may
end there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from xla_core.operators.extensions import extensions

Result = tuple[object, tuple[int, ...]]
"""The partition spec and the whole shape of a result."""


def over_parts(
    function: Callable[..., Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor | None],
    specs: Sequence[object],
    results: Sequence[Result],
    mesh: object,
) -> Sequence[torch.Tensor]:
    """``function(*tensors)`` on each device's parts as ``specs`` and ``results`` say, or whole without a mesh."""
    split = extensions().hook.xla_core_over_parts(
        function=function, tensors=tensors, specs=specs, results=results, mesh=mesh
    )
    return function(*tensors) if split is None else split


def splits_positions(spec: Sequence[object]) -> bool:
    """Whether a spec splits one of the last two dimensions (lengths and sizes), which kernels need whole."""
    return any(axis is not None for axis in spec[-2:])
