"""Operators on lists of tensors that do the same to each element (``_foreach_add_``, ``_fused_adam_``)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

from xla_core.torch_bridge.operands import Operand

_PREFIXES: Final = ("aten._foreach_", "aten._fused_")
# With the overload ``Tensor`` their numbers are the elements of one tensor.
_NUMBERS_IN_A_TENSOR: Final = ("aten._foreach_addcmul", "aten._foreach_addcdiv")


def is_per_element(name: str) -> bool:
    """Whether the overload of this name (``aten._foreach_add_.List``) goes through its lists in step."""
    if name.startswith(_NUMBERS_IN_A_TENSOR) and name.endswith(".Tensor"):
        return False
    return name.startswith(_PREFIXES)


def distinct_elements(
    args: Sequence[Operand], image: Callable[[object], Hashable]
) -> tuple[list[object], list[int]] | None:
    """The arguments with the elements that differ from each other, and where each element went.

    Elements are alike when ``image`` is the same in all lists. None where the lists do not go in
    step (an error that the operator itself words best), or nothing would be saved.
    """
    lists = [a for a in args if isinstance(a, (list, tuple)) and a]
    if not lists or len({len(items) for items in lists}) != 1:
        return None
    seen: dict[Hashable, int] = {}
    places = [seen.setdefault(image(element), len(seen)) for element in zip(*lists, strict=True)]
    if len(seen) == len(places):
        return None
    first = [places.index(i) for i in range(len(seen))]
    kept = [[a[i] for i in first] if isinstance(a, (list, tuple)) and a else a for a in args]
    return kept, places
