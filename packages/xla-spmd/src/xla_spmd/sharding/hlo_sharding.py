"""``Sharding``: how the elements of one value are split over the devices, and the texts that describe it.

The texts are those of XLA's ``HloSharding``: ``{replicated}``, or for example
``{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}``. torch_xla lists the devices, as here; newer compilers write
them as a transposed range (``<=[2,2]T(1,0)``). ``parse`` reads both forms. ``Sharding.text`` always lists the
devices, so that equal shardings have equal texts.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from xla_core.support import caches

MSG_NOT_A_SHARDING: Final = (
    "{text!r} is not an HLO sharding such as '{{devices=[2,1]0,1}}' or '{{replicated}}'"
)

_TILED: Final = re.compile(
    r"\{devices=\[(?P<tiles>[\d,]+)\]"
    r"(?:<=\[(?P<iota>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<listed>[\d,]+))"
    r"(?:\s+(?P<last>last_tile_dim_replicate|last_tile_dims=\{[^}]*\}))?\s*\}"
)
_MAXIMAL: Final = re.compile(r"\{maximal device=(\d+)\}")


class ShardingType(enum.IntEnum):
    """The kinds of sharding, with the numbers that torch_xla gives them."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Sharding:
    """The sharding of one value over the devices ``0 .. n-1`` of a job.

    ``tiles`` has the number of parts along each dimension of the value. If ``last`` is set, ``tiles`` has one more
    number, which belongs to no dimension: that many devices hold copies of the same part (``"replicated"``), or
    each holds its own value for that part (``"manual"``). ``devices`` lists the devices of the parts in C order.
    Both are empty for a replicated value.
    """

    type: ShardingType
    tiles: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    last: str | None = None

    @property
    def text(self) -> str:
        """The HLO text, with the devices listed."""
        match self.type:
            case ShardingType.REPLICATED:
                return "{replicated}"
            case ShardingType.MANUAL:
                return "{manual}"
            case ShardingType.MAXIMAL:
                return f"{{maximal device={self.devices[0]}}}"
        tiles, devices = (",".join(map(str, x)) for x in (self.tiles, self.devices))
        last = {None: "", "replicated": " last_tile_dim_replicate"}.get(
            self.last, f" last_tile_dims={{{self.last}}}"
        )
        return f"{{devices=[{tiles}]{devices}{last}}}"

    @property
    def per_dimension(self) -> tuple[int, ...]:
        """The number of parts along each dimension of the value; empty if the value is not split."""
        return self.tiles[:-1] if self.last else self.tiles

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one part of a value of ``shape``: of the first, and largest, if they are not all equal."""
        if not self.tiles:
            return tuple(shape)
        return tuple(-(-n // parts) for n, parts in zip(shape, self.per_dimension, strict=True))

    def padded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """``shape`` with each dimension rounded up to a multiple of the number of its parts."""
        if not self.tiles:
            return tuple(shape)
        return tuple(
            -(-n // parts) * parts for n, parts in zip(shape, self.per_dimension, strict=True)
        )

    def indices(self, shape: Sequence[int]) -> dict[int, tuple[slice, ...]]:
        """For each device, the slices of its part of a value of ``shape``. Empty if the value is not split."""
        if not self.tiles:
            return {}
        part = self.shard_shape(shape)
        grid = np.array(self.devices).reshape(self.tiles)
        by_device = {}
        for place in np.ndindex(grid.shape):
            # the last parts may be shorter, or empty
            by_device[int(grid[place])] = tuple(
                slice(min(i * size, n), min((i + 1) * size, n))
                for i, size, n in zip(place, part, shape, strict=False)
            )
        return by_device

    def places(self) -> dict[int, tuple[int, ...]]:
        """For each device, the coordinates of its part in the grid of parts. Empty if the value is not split."""
        rank = len(self.per_dimension)
        grid = np.array(self.devices).reshape(self.tiles) if self.tiles else np.array([])
        return {int(grid[place]): place[:rank] for place in np.ndindex(grid.shape)}


REPLICATED: Final = Sharding(ShardingType.REPLICATED)
MANUAL: Final = Sharding(ShardingType.MANUAL)


def tiled(grid: np.ndarray, rank: int) -> Sharding:
    """The sharding of a value with ``rank`` dimensions whose parts are on the devices in ``grid``.

    ``grid`` has one dimension per dimension of the value. It may have one more: the devices along it hold copies
    of the same part.
    """
    tiles = tuple(map(int, grid.shape))
    if math.prod(tiles[:rank]) == 1:
        return REPLICATED
    devices = tuple(map(int, grid.flat))
    if len(tiles) > rank and tiles[-1] > 1:
        return Sharding(ShardingType.PARTIAL, tiles, devices, "replicated")
    return Sharding(ShardingType.TILED, tiles[:rank], devices)


@caches.memoized("parsed shardings")
def parse(text: str | None) -> Sharding:
    """The sharding that an HLO text describes; None stands for the whole value on every device.

    Raises ValueError if the text is not an HLO sharding.
    """
    if text is None or text == "{replicated}":
        return REPLICATED
    if text == "{manual}":
        return MANUAL
    single = _MAXIMAL.fullmatch(text)
    if single is not None:
        return Sharding(ShardingType.MAXIMAL, (), (int(single[1]),))
    match = _TILED.fullmatch(text)
    if match is None:
        raise ValueError(MSG_NOT_A_SHARDING.format(text=text))
    return _parse_tiled(text, match)


def _parse_tiled(text: str, match: re.Match[str]) -> Sharding:
    tiles = _numbers(match["tiles"])
    if match["listed"] is not None:
        ids = np.array(_numbers(match["listed"]))
    else:
        ids = np.arange(math.prod(_numbers(match["iota"]))).reshape(_numbers(match["iota"]))
        if match["order"] is not None:
            ids = ids.transpose(_numbers(match["order"]))
    if ids.size != math.prod(tiles):
        raise ValueError(MSG_NOT_A_SHARDING.format(text=text))
    last = match["last"]
    if last is not None and last.startswith("last_tile_dims="):
        kinds = last.removeprefix("last_tile_dims={").removesuffix("}")
        if kinds != "replicated":
            return Sharding(ShardingType.PARTIAL, tiles, tuple(map(int, ids.flat)), kinds)
    return tiled(ids.reshape(tiles), len(tiles) - (last is not None))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


@caches.memoized("canonical texts of shardings")
def canonical(text: str | None) -> str | None:
    """The canonical form of an HLO text, in which equal shardings have equal texts; None if it is replicated."""
    sharding = parse(text)
    return None if sharding.type is ShardingType.REPLICATED else sharding.text
