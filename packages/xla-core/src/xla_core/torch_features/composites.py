"""Composites: named parts of a computation, which a compiler may replace.

A builder marks the operands and results of a part. In the lowered program the part becomes one
``stablehlo.composite`` with the name, the attributes, and the computation as a function of its own.
"""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Final

import torch

import xla_core.torch_bridge.marking_ops  # noqa: F401 - PyTorch learns of the operators there
from xla_core.dynamo import dynamo_backend
from xla_core.recording.xla_tensor import XLATensor

MSG_NAME: Final = (
    "{name!r} is not a valid name for a composite: StableHLO requires a namespace and a name, such as "
    "'mylib.attention'"
)
MSG_NOT_A_TENSOR: Final = "composite {name!r}: only torch tensors can be marked, got a {type}"
MSG_ATTRIBUTES: Final = (
    "composite {name!r}: attributes are a dict from str to str, int, float, bool or a list of int, float or "
    "bool, got {got!r}"
)

Attribute = str | int | float | bool | list[int] | list[float] | list[bool]

_SCALARS: Final = (str, int, float, bool)


class StableHLOCompositeBuilder:
    """Marks one composite, called ``name``, with the attributes ``attr``.

    Call ``mark_inputs`` once, then ``mark_outputs`` once. All operations between them that depend on the marked
    inputs belong to the composite; other values that these read become further operands. Raises ValueError for a
    name without a namespace (``"mylib.attention"`` has one) and for attributes of other types than StableHLO's.
    """

    def __init__(self, name: str, attr: Mapping[str, Attribute] | None = None) -> None:
        if not _is_namespaced(name):
            raise ValueError(MSG_NAME.format(name=name))
        self.name = name
        self.attr = attr
        self._items = _checked(name, attr)
        self._id = _unique()
        self._epoch = -1

    def mark_inputs(self, *tensors: torch.Tensor) -> object:
        """The tensors to use from here on instead of ``tensors``: one, or a tuple of several."""
        return self._mark(tensors, is_input=True)

    def mark_outputs(self, *tensors: torch.Tensor) -> object:
        """The tensors to use from here on instead of ``tensors``: one, or a tuple of several."""
        return self._mark(tensors, is_input=False)

    def _mark(self, tensors: tuple[torch.Tensor, ...], is_input: bool) -> object:
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(
                    MSG_NOT_A_TENSOR.format(name=self.name, type=type(tensor).__name__)
                )
        self._name_by_position(tensors)
        attr = None if is_input else self._items
        marked = tuple(
            torch.ops.xla.mark_tensor(t, self.name, i, self._id, is_input, attr)
            for i, t in enumerate(tensors)
        )
        return marked[0] if len(marked) == 1 else marked

    def _name_by_position(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Make the composite's id its position in the step, which is the same whenever the step is repeated."""
        if torch.compiler.is_compiling():
            return  # a graph is recorded once, so any id will do
        for tensor in tensors:
            if isinstance(tensor, XLATensor):
                trace = tensor._s.trace
                with trace.lock:
                    if trace.epoch != self._epoch:
                        self._epoch = trace.epoch
                        self._id = str(trace.cur.depth)
                return


@dynamo_backend.constant_in_graphs
def _is_namespaced(name: str) -> bool:
    # as StableHLO's verifier requires
    return re.fullmatch(r"[a-zA-Z]\w*(\.[\w$]+)+", name, re.ASCII) is not None


@dynamo_backend.constant_in_graphs
def _unique() -> str:
    return uuid.uuid4().hex


def _checked(
    name: str, attr: Mapping[str, Attribute] | None
) -> tuple[tuple[str, Attribute], ...] | None:
    if attr is None:
        return None
    good = isinstance(attr, Mapping) and all(
        isinstance(key, str) and _is_attribute(value) for key, value in attr.items()
    )
    if not good:
        raise ValueError(MSG_ATTRIBUTES.format(name=name, got=attr))
    return tuple(attr.items())


def _is_attribute(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        kinds = {type(item) for item in value}
        return len(kinds) == 1 and kinds <= {int, float, bool}
    return type(value) in _SCALARS


@dataclasses.dataclass
class BoundaryMetadata:
    """The data of a mark: the value is operand or result number ``pos`` of the composite ``name``."""

    name: str
    pos: int
    id: str
    is_input: bool = True
    attr: dict[str, Attribute] | None = None


class BoundaryMetadataSerializer(json.JSONEncoder):
    """Writes ``BoundaryMetadata`` as JSON: ``json.dumps(metadata, cls=BoundaryMetadataSerializer)``."""

    def default(self, o: object) -> object:
        """A dict of the fields by name."""
        return dataclasses.asdict(o) if isinstance(o, BoundaryMetadata) else super().default(o)


def serialize_composite_attr(
    attr: Mapping[str, Attribute] | None,
) -> tuple[tuple[str, Attribute], ...] | None:
    """A composite's attributes as pairs, with lists as tuples. Raises ValueError for other types of values."""
    items = _checked("serialize_composite_attr", attr)
    if items is None:
        return None
    return tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in items)  # type: ignore[misc]


def deserialize_composite_attr(
    attr: Iterable[tuple[str, Attribute]] | None,
) -> dict[str, Attribute] | None:
    """The attributes of the pairs that ``serialize_composite_attr`` returned."""
    if attr is None:
        return None
    return {k: list(v) if isinstance(v, tuple) else v for k, v in attr}


def mark_tensor(
    x: torch.Tensor, name: str, pos: int, id: str, is_input: bool, attr: object = None
) -> torch.Tensor:
    """Mark ``x`` as operand or result number ``pos`` of the composite ``name``; use the returned tensor instead.

    ``id`` distinguishes composites of one name. ``attr``, for results only, is a dict or the pairs of
    ``serialize_composite_attr``. ``StableHLOCompositeBuilder`` is easier to use.
    """
    items = tuple(attr.items()) if isinstance(attr, Mapping) else attr
    marked: torch.Tensor = torch.ops.xla.mark_tensor(x, name, pos, id, is_input, items)
    return marked
