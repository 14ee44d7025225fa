"""Flattens and checks the arguments of a call as they were at the export of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch.utils import _pytree as pytree

from xla_core.export.bundle import VariableSignature
from xla_core.torch_bridge.operands import Operand

MSG_KEYWORDS: Final = "the model was exported with the keyword arguments {wanted}, got {got}"
MSG_COUNT: Final = (
    "the model was exported with {wanted} arguments (all tensors and numbers, nested ones included), "
    "got {got}; call it with arguments of the same structure"
)
MSG_MISFIT: Final = "argument {position} is {got}; the model was exported for {wanted}"


def flatten(
    spec: pytree.TreeSpec | None, args: Sequence[Operand], kwargs: Mapping[str, Operand]
) -> list[object]:
    """The leaves of a call's arguments, in the order of ``spec``, the structure of ``(args, kwargs)``.

    If ``spec`` is None, the leaves are ``args``. Raises TypeError if the keywords or the number of leaves differ.
    """
    if spec is None:
        return list(args)
    keywords = _keywords(spec)
    if set(keywords) != set(kwargs):
        raise TypeError(MSG_KEYWORDS.format(wanted=keywords, got=list(kwargs)))
    leaves: list[Operand] = pytree.tree_leaves(
        (tuple(args), {name: kwargs[name] for name in keywords})
    )
    if len(leaves) != spec.num_leaves:
        raise TypeError(MSG_COUNT.format(wanted=spec.num_leaves, got=len(leaves)))
    return leaves


def _keywords(spec: pytree.TreeSpec) -> list[str]:
    children = spec.children()
    if spec.type is tuple and len(children) == 2 and children[1].type is dict:
        return list(children[1].context)
    return []


def check(position: int, given: torch.Tensor, wanted: VariableSignature) -> None:
    """Raise TypeError unless an argument has the wanted dtype, and shape except in dynamic dimensions."""
    dtype = str(given.dtype).removeprefix("torch.")
    fits = (
        dtype == wanted.dtype
        and given.dim() == len(wanted.shape)
        and all(
            i in wanted.dynamic_dims or size == wanted.shape[i]
            for i, size in enumerate(given.shape)
        )
    )
    if not fits:
        shape = ["?" if i in wanted.dynamic_dims else s for i, s in enumerate(wanted.shape)]
        raise TypeError(
            MSG_MISFIT.format(
                position=position,
                got=f"{dtype}{list(given.shape)}",
                wanted=f"{wanted.dtype}[{', '.join(map(str, shape))}]",
            )
        )
