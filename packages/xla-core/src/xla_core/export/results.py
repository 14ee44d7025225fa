"""How a program's results make up what the caller gets, as PyTorch writes such structures down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from torch.utils import _pytree as pytree

from xla_core.torch_bridge.operands import Operand

_NAME: Final = "xla_core.export.Nothing"
# named tuples of operators (``torch.topk``); they have no name to be written down with
_OF_OPERATORS: Final = "torch.return_types"


class Nothing:
    """A container without items that comes back as ``None``: no result of a program, and yet a place."""


# None itself is a leaf, which needs a value.
pytree.register_pytree_node(
    Nothing,
    lambda _: ([], None),
    lambda _items, _context: None,
    serialized_type_name=_NAME,
)


def result_spec(
    spec: pytree.TreeSpec, is_nothing: Sequence[bool], written: Sequence[str] | None
) -> pytree.TreeSpec:
    """``spec`` with the leaves marked in ``is_nothing`` as containers of nothing.

    With ``written`` that is the first of two items, and a dict with these names the second. Named
    tuples of operators become plain ones.
    """
    if written is None and not any(is_nothing) and not any(map(_is_of_operator, _types(spec))):
        return spec
    leaves = [Nothing() if nothing else 0 for nothing in is_nothing]
    result = _plain(pytree.tree_unflatten(leaves, spec))
    if written is not None:
        result = (result, dict.fromkeys(written, 0))
    plain_spec: pytree.TreeSpec = pytree.tree_structure(result)
    return plain_spec


def _types(spec: pytree.TreeSpec) -> Iterator[object]:
    yield spec.type
    for child in spec.children():
        yield from _types(child)


def _is_of_operator(kind: object) -> bool:
    return getattr(kind, "__module__", "") == _OF_OPERATORS


def _plain(result: Operand) -> Operand:
    if _is_of_operator(type(result)) or type(result) is tuple:
        return tuple(map(_plain, result))
    if type(result) is list:
        return list(map(_plain, result))
    return {k: _plain(v) for k, v in result.items()} if type(result) is dict else result
