"""Calls of kernels over a mesh of devices: each computes the parts that it holds.

Forward and backward pass are split each by itself. What autograd keeps between them are whole tensors, since a
step may end there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_core.operators.extensions import extensions

Result = tuple[Any, tuple[int, ...]]
"""The partition spec and the whole shape of a result."""


def over_parts(
    function: Callable[..., Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor | None],
    specs: Sequence[Any],
    results: Sequence[Result],
    mesh: Any,
) -> Sequence[torch.Tensor]:
    """``function(*tensors)`` by parts as ``specs`` and ``results`` say; whole where there is no mesh."""
    split = extensions().hook.xla_core_over_parts(
        function=function, tensors=tensors, specs=specs, results=results, mesh=mesh
    )
    return function(*tensors) if split is None else split


def splits_positions(spec: Sequence[Any]) -> bool:
    """Whether a spec splits the last two dimensions, positions and sizes, which kernels need whole."""
    return any(axis is not None for axis in spec[-2:])
