"""The ways to split a step's inputs over a mesh, from which automatic sharding chooses.

Data is split in its first dimension, over the axes ``data`` and ``fsdp``. A parameter of two or more dimensions is
split over ``tensor`` in the larger of its last two dimensions (in a decoder these are the outputs of weights that
widen, the inputs of weights that narrow, and the vocabulary of embeddings), and over ``fsdp`` in the largest of the
other dimensions. Optimizer state is split like a parameter of its shape.
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
"""Smaller parameters, in bytes, are not split, as sending the parts takes longer than reading the whole."""


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """A mesh, and a partition spec for each input (None: unchanged).

    ``rows``: square weights are split over ``tensor`` in their inputs, not in their outputs.
    """

    axes: Axes
    specs: tuple[PartitionSpec | None, ...]
    rows: bool = False

    @property
    def title(self) -> str:
        """The mesh as text, such as ``fsdp=4,tensor=2``."""
        mesh = ",".join(f"{name}={size}" for name, size in self.axes)
        return f"{mesh} (square weights by rows)" if self.rows else mesh


def batch_of(inputs: Sequence[StepInput]) -> int:
    """The most frequent size of the data's first dimensions, 0 without data."""
    sizes = collections.Counter(
        one.shape[0] for one in inputs if one.role == DATA and one.shape and not one.annotated
    )
    # of equally frequent sizes the first, as inputs are in the order of their use
    return max(sizes, key=lambda size: (sizes[size], size > 1), default=0)


def splits(inputs: Sequence[StepInput], meshes: Sequence[Axes]) -> Iterator[Split]:
    """All different ways to split the inputs over one of the meshes in which each axis splits something."""
    batch = batch_of(inputs)
    seen = set()
    for axes in meshes:
        sizes = dict(axes)
        copies = math.prod(sizes.get(axis, 1) for axis in DATA_AXES)
        if copies > 1 and (not batch or batch % copies):
            continue
        for rows in (False, True) if "tensor" in sizes else (False,):
            specs = tuple(_spec(one, sizes, batch, rows) for one in inputs)
            if _used_axes(inputs, specs) >= sizes.keys() - {"data"} and (axes, specs) not in seen:
                seen.add((axes, specs))
                yield Split(axes, specs, rows)


def _used_axes(inputs: Sequence[StepInput], specs: Sequence[PartitionSpec | None]) -> set[str]:
    """The axes over which parameters are split."""
    own = (spec for one, spec in zip(inputs, specs, strict=True) if one.role == PARAMETER)
    return {axis for spec in own for entry in spec or () for axis in axes_of(entry)}


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The axes of one entry of a partition spec."""
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
    """The shape of one device's part of a value."""
    if spec is None:
        return list(shape)
    return [
        math.ceil(size / math.prod(sizes[axis] for axis in axes_of(entry)))
        for size, entry in zip(shape, spec, strict=True)
    ]
