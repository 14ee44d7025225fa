"""How a step's inputs may be split over a mesh: the rules that an automatic sharding is chosen from.

Data lies along the axes ``data`` and ``fsdp`` with its first dimension. A parameter of two or more dimensions
lies along ``tensor`` with its larger side of the last two (that is, in a decoder, each weight that widens by its
outputs and each that narrows by its inputs, and embeddings by their vocabulary), and along ``fsdp`` with the
largest side that is left. State lies as the parameter of its shape.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from xla_core.contract.step_sharding import (
    DATA,
    PARAMETER,
    STATE,
    Axes,
    PartitionSpec,
    StepInput,
)

DATA_AXES = ("data", "fsdp")
AXES = (*DATA_AXES, "tensor")
_LITTLE = 1 << 16
"""Bytes of a parameter that is not worth splitting: sending the parts takes longer than reading the whole."""


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """A mesh, and a spec for each input (None: as it is).

    ``rows``: square weights lie along ``tensor`` with their inputs, not with their outputs.
    """

    axes: Axes
    specs: tuple[PartitionSpec | None, ...]
    rows: bool = False

    @property
    def title(self) -> str:
        """``fsdp=4,tensor=2``."""
        mesh = ",".join(f"{name}={size}" for name, size in self.axes)
        return f"{mesh} (square weights by rows)" if self.rows else mesh


def batch_of(inputs: Sequence[StepInput]) -> int:
    """The size that most of the data's first dimensions have; 0 where there is no data."""
    sizes = collections.Counter(
        one.shape[0] for one in inputs if one.role == DATA and one.shape and not one.annotated
    )
    # the first of those that are equally frequent: data comes in the order of its use
    return max(sizes, key=lambda size: (sizes[size], size > 1), default=0)


def splits(inputs: Sequence[StepInput], meshes: Sequence[Axes]) -> Iterator[Split]:
    """Every way to split the inputs over one of the meshes, each once, none with an axis that nothing lies on."""
    batch = batch_of(inputs)
    seen = set()
    for axes in meshes:
        sizes = dict(axes)
        copies = math.prod(sizes.get(axis, 1) for axis in DATA_AXES)
        if copies > 1 and (not batch or batch % copies):
            continue
        for rows in (False, True) if "tensor" in sizes else (False,):
            specs = tuple(_spec(one, sizes, batch, rows) for one in inputs)
            if _lying(inputs, specs) >= sizes.keys() - {"data"} and (axes, specs) not in seen:
                seen.add((axes, specs))
                yield Split(axes, specs, rows)


def _lying(inputs: Sequence[StepInput], specs: Sequence[PartitionSpec | None]) -> set[str]:
    """The axes that parameters lie on."""
    own = (spec for one, spec in zip(inputs, specs, strict=True) if one.role == PARAMETER)
    return {axis for spec in own for entry in spec or () for axis in _axes_of(entry)}


def _axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()


def _spec(one: StepInput, sizes: Mapping[str, int], batch: int, rows: bool) -> PartitionSpec | None:
    if one.annotated or not one.shape:
        return None
    if one.role == DATA and one.shape[0] == batch:
        axes = tuple(axis for axis in DATA_AXES if axis in sizes)
        first = axes if len(axes) > 1 else axes[0] if axes else None
        return (first, *[None] * (len(one.shape) - 1)) if axes else None
    if one.role in (PARAMETER, STATE):
        return _weight(one, sizes, rows)
    return None


def _weight(one: StepInput, sizes: Mapping[str, int], rows: bool) -> PartitionSpec:
    shape = one.shape
    spec: list[str | tuple[str, ...] | None] = [None] * len(shape)
    if math.prod(shape) * one.itemsize < _LITTLE:
        return tuple(spec)
    if "tensor" in sizes and len(shape) >= 2:
        out, inner = len(shape) - 2, len(shape) - 1
        side = inner if shape[inner] > shape[out] or (rows and shape[inner] == shape[out]) else out
        if shape[side] % sizes["tensor"] == 0:
            spec[side] = "tensor"
    if "fsdp" in sizes:
        left = [d for d, axis in enumerate(spec) if axis is None and shape[d] % sizes["fsdp"] == 0]
        if left:
            spec[max(left, key=lambda d: (shape[d], -d))] = "fsdp"
    return tuple(spec)


def part_of(
    shape: Sequence[int], spec: PartitionSpec | None, sizes: Mapping[str, int]
) -> list[int]:
    """The shape of what one device holds."""
    if spec is None:
        return list(shape)
    return [
        math.ceil(size / math.prod(sizes[axis] for axis in _axes_of(entry)))
        for size, entry in zip(shape, spec, strict=True)
    ]
