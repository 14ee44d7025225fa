"""Operators of our own, in PyTorch's namespace ``xla``.

``XLA_LIB`` is the namespace's library: third parties define further operators through it, and register
their lowering rules with ``xla_core.lowering.registry``.
"""

from __future__ import annotations

from typing import Final

import torch

XLA_LIB: Final = torch.library.Library("xla", "DEF")
"""The library that defines the namespace ``torch.ops.xla``."""

XLA_LIB.define("optimization_barrier(Tensor[] tensors) -> Tensor[]")
XLA_LIB.define("computation(Tensor[] tensors, float[] floats, int[] ints) -> Tensor[]")
