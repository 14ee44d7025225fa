"""Names for what crosses the border to PyTorch, where no type says more.

PyTorch hands an operator its arguments by position and by name. Their types follow from the operator's
schema, which a type checker does not read: to it all of them are ``Any``. That is written here
once, under names that say what is meant.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

Operand: TypeAlias = Any
"""One argument or result of an operator: a tensor, a list of them, a number, a dtype, a device, a string, None."""

Operands: TypeAlias = tuple[Operand, ...]
"""An operator's arguments by position."""

NamedOperands: TypeAlias = dict[str, Operand]
"""An operator's arguments by name."""

Tree: TypeAlias = Any
"""What a user's function takes or returns: tensors, numbers and None in nested tuples, lists and dicts."""

Gradients: TypeAlias = torch.Tensor | tuple[torch.Tensor | None, ...] | None
"""What ``backward`` of a ``torch.autograd.Function`` returns: a gradient for each input, None for what has none."""

AutogradContext: TypeAlias = Any
"""``ctx`` of a ``torch.autograd.Function``: it holds what ``forward`` keeps for ``backward``."""

TorchObject: TypeAlias = Any
"""An object of PyTorch's without a public class, or whose attributes differ by version: a schema, a tree's spec."""
