"""Flattens pytrees of tensors, which may contain None in place of a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch.utils import _pytree as pytree

from xla_core.operators.tensor_meta import TensorMeta, tensor_meta
from xla_core.recording.xla_tensor import XLATensor
from xla_core.torch_bridge.operands import TorchObject, Tree

MSG_LEAF: Final = "{what} contains {got}; its leaves are tensors on an xla device, or None"


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """The structure of a flattened tree: its spec, and which of its leaves are tensors and not None."""

    spec: TorchObject
    present: tuple[bool, ...]

    def unflatten(self, tensors: Sequence[object]) -> Tree:
        """The tree with these leaves."""
        remaining: Iterator[Tree] = iter(tensors)
        leaves = [next(remaining) if there else None for there in self.present]
        return pytree.tree_unflatten(leaves, self.spec)


def flatten(tree: Tree, what: str) -> tuple[list[XLATensor], Structure]:
    """The tensors of a tree, and its structure. Raises TypeError, with ``what`` in its text, for other leaves."""
    leaves, spec = pytree.tree_flatten(tree)
    tensors: list[XLATensor] = []
    for leaf in leaves:
        if isinstance(leaf, XLATensor):
            tensors.append(leaf)
        elif leaf is not None:
            got = f"a tensor on {leaf.device}" if isinstance(leaf, torch.Tensor) else repr(leaf)
            raise TypeError(MSG_LEAF.format(what=what, got=got))
    return tensors, Structure(spec, tuple(leaf is not None for leaf in leaves))


def metas(tensors: Sequence[torch.Tensor]) -> tuple[TensorMeta, ...]:
    """The shapes and dtypes of tensors."""
    return tuple(tensor_meta(tuple(t.shape), t.dtype) for t in tensors)
