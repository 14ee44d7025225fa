"""The structure of the caller's result, made of a program's results, in PyTorch's serialized form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from torch.utils import _pytree as pytree

from xla_core.torch_bridge.operands import Operand

_NAME: Final = "xla_core.export.Nothing"
# the module of operators' named tuples (``torch.topk``), which cannot be serialized
_OF_OPERATORS: Final = "torch.return_types"


class Nothing:
    """A container without items that becomes ``None``, in a place for which a program has no result."""


# None itself would be a leaf, and every leaf needs a result.
pytree.register_pytree_node(
    Nothing,
    lambda _: ([], None),
    lambda _items, _context: None,
    serialized_type_name=_NAME,
)


def result_spec(
    spec: pytree.TreeSpec, is_nothing: Sequence[bool], written: Sequence[str] | None
) -> pytree.TreeSpec:
    """``spec`` with a ``Nothing`` in place of each leaf that is marked in ``is_nothing``.

    If ``written`` is not None, the result is a pair of that and a dict with these names. Named tuples of operators
    become plain tuples.
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
