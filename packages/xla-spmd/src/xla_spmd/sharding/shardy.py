"""Translates HLO shardings for Shardy: into axes of one mesh that all shardings of a program share.

An HLO sharding lists devices; Shardy, XLA's partitioner, names axes of a mesh. The mesh follows from the
strides at which a program's shardings step through the devices. The sharding
``{devices=[2,4]0,1,2,3,4,5,6,7}`` has strides 4 and 1, so the mesh is 2 x 4; a value that is split into 8 parts
is then split over both axes.
"""

from __future__ import annotations

import dataclasses
import itertools
import string
from collections.abc import Iterable, Sequence

import numpy as np

from xla_spmd.sharding.hlo_sharding import Sharding, ShardingType, parse

# One step pattern through the devices: how many of them, and how far apart they are.
_Walk = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class ShardyMesh:
    """A mesh of named axes.

    ``sizes`` are those of the axes, the last of which varies fastest. ``order`` lists the devices that fill the
    mesh.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names: one letter for each."""
        return tuple(string.ascii_lowercase[: len(self.sizes)])

    def annotation(self, sharding: Sharding, rank: int) -> str:
        """Shardy's text for ``sharding`` of a value with ``rank`` dimensions.

        All dimensions are closed: the partitioner must not split them further.
        """
        dimensions: list[tuple[str, ...]] = [()] * rank
        if sharding.tiles:
            walks = _walks(sharding, self.order)
            assert walks is not None  # common_mesh() has checked it
            dimensions = [self._axes(walk) for walk in walks[:rank]]
        lists = ", ".join("{" + ", ".join(f'"{a}"' for a in axes) + "}" for axes in dimensions)
        return f"#sdy.sharding<{self._text()}, [{lists}]>"

    def translate(self, text: str, rank: int) -> str:
        """Shardy's text for the HLO sharding ``text`` of a value with ``rank`` dimensions."""
        return self.annotation(parse(text), rank)

    def parts(self, text: str, rank: int) -> tuple[int, ...]:
        """The number of parts along each of ``rank`` dimensions that the HLO sharding ``text`` makes."""
        return parse(text).per_dimension or (1,) * rank

    def _text(self) -> str:
        axes = ", ".join(f'"{n}"={s}' for n, s in zip(self.names, self.sizes, strict=True))
        if self.order == tuple(range(len(self.order))):
            return f"mesh<[{axes}]>"
        return f"mesh<[{axes}], device_ids={list(self.order)}>"

    def _axes(self, walks: Sequence[_Walk]) -> tuple[str, ...]:
        strides = list(itertools.accumulate(self.sizes[:0:-1], lambda a, b: a * b, initial=1))[::-1]
        return tuple(
            name
            for size, stride in walks
            for name, own in zip(self.names, strides, strict=True)
            if stride <= own < stride * size
        )


def common_mesh(shardings: Iterable[Sharding], count: int) -> ShardyMesh | None:
    """The mesh over ``count`` devices with whose axes all ``shardings`` can be written, or None if there is none.

    There is none if one of them is manual, if they use incompatible orders of devices, or if their sizes do not
    divide each other, such as 2 x 3 and 3 x 2.
    """
    distinct = set(shardings)
    if any(s.type not in _KNOWN or s.last not in (None, "replicated") for s in distinct):
        return None
    split = sorted((s for s in distinct if s.tiles), key=lambda s: s.text)
    orders = [tuple(range(count)), *dict.fromkeys(s.devices for s in split)]
    for order in orders:
        sizes = _sizes(split, order)
        if sizes is not None:
            return ShardyMesh(sizes, order)
    return None


_KNOWN = (ShardingType.REPLICATED, ShardingType.TILED, ShardingType.PARTIAL)


def _sizes(split: Sequence[Sharding], order: tuple[int, ...]) -> tuple[int, ...] | None:
    """The sizes of the axes that the shardings ``split`` need over devices in this ``order``, or None."""
    # A walk of n devices at stride s needs axes that begin at stride s and end at stride s * n.
    bounds = {1, len(order)}
    for sharding in split:
        walks = _walks(sharding, order)
        if walks is None:
            return None
        bounds |= {b for walk in walks for size, stride in walk for b in (stride, stride * size)}
    ladder = sorted(bounds)
    if any(high % low for low, high in itertools.pairwise(ladder)):
        return None
    return tuple(high // low for low, high in itertools.pairwise(ladder))[::-1] or (1,)


def _walks(sharding: Sharding, order: tuple[int, ...]) -> list[list[_Walk]] | None:
    """The walks that each tile dimension consists of, slowest first; None if the devices follow no such pattern."""
    position = np.empty(len(order), int)
    position[list(order)] = range(len(order))
    grid = position[list(sharding.devices)].reshape(sharding.tiles)
    if grid.size != len(order) or grid.flat[0] != 0:
        return None
    walks = []
    # the positions that the walks of the first line of each dimension imply; the other lines must agree
    rebuilt = np.zeros_like(grid)
    for axis, size in enumerate(grid.shape):
        line = np.moveaxis(grid, axis, 0).reshape(size, -1)[:, 0]
        walk = _decompose(line.tolist())
        if walk is None:
            return None
        walks.append(walk)
        rebuilt += line.reshape([-1 if i == axis else 1 for i in range(grid.ndim)])
    return walks if np.array_equal(rebuilt, grid) else None


def _decompose(line: Sequence[int]) -> list[_Walk] | None:
    """The walks, slowest first, that make up the positions ``line``, or None if none do.

    ``[0, 1, 4, 5]`` is a walk of 2 at stride 4, at each stop of which there is a walk of 2 at stride 1.
    """
    if len(line) == 1:
        return []
    stride = line[1]
    run = next((i for i, n in enumerate(line) if n != i * stride), len(line))
    if stride < 1 or run < 2 or len(line) % run:
        return None
    outer = _decompose(line[::run])
    return None if outer is None else [*outer, (run, stride)]
