"""From how many devices a parameter is gathered to compute with another value, by the shardings of both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from xla_core.extension_api.steps import Entry, operations_of
from xla_core.support import caches
from xla_spmd.lowering.annotation_ops import annotated
from xla_spmd.lowering.propagation import known_shardings
from xla_spmd.sharding.hlo_sharding import Sharding, ShardingType, parse


class Gathering:
    """``gathered(parameter, value)`` of a step's layout (``Layout``).

    ``entries`` are those of the step, ``inputs`` and ``fixed`` the HLO shardings of its inputs and of the values
    whose sharding is given, by value number. ``count`` is the number of devices.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        inputs: Mapping[int, str],
        fixed: Mapping[int, str],
        count: int,
    ) -> None:
        self.entries = entries
        self.inputs = inputs
        self.fixed = fixed
        self.count = count

    def __call__(self, parameter: int, value: int) -> int:
        """The number of devices; 1 where one of the shardings is not known."""
        of_parameter, of_value = self._known(parameter), self._known(value)
        if of_parameter is None or of_value is None:
            return 1
        return devices(of_parameter, of_value, self.count)

    @functools.cached_property
    def _known(self) -> Callable[[int], str | None]:
        # what is annotated is split so already where it comes from, unless that is said, too
        operations = operations_of(self.entries)
        sources = {o.args[0].vid: t for o in operations if (t := annotated(o)) is not None}
        return known_shardings(self.entries, self.inputs, sources | dict(self.fixed))


@caches.memoized("devices that parameters are gathered from")
def devices(parameter: str, value: str, count: int) -> int:
    """The number of ``count`` devices whose parts of a parameter each needs to compute with its part of a value.

    Both are HLO shardings. Along axes of a mesh that split the parameter alone, as tensor parallelism has them,
    each device computes with its own part, and along axes that split both, all parts are needed: the number is
    the product of the sizes of the latter.
    """
    parts = [_parts(parse(text), count) for text in (parameter, value)]
    both = len(set(zip(*parts, strict=True)))
    return len(set(parts[0])) * len(set(parts[1])) // both


def _parts(sharding: Sharding, count: int) -> list[int]:
    """The number of the part that each device has."""
    if sharding.type not in (ShardingType.TILED, ShardingType.PARTIAL):
        return [0] * count
    grid = np.array(sharding.devices).reshape(*sharding.per_dimension, -1)
    part = np.empty(count, int)
    copies = grid.shape[-1]
    part[grid.reshape(-1)] = np.arange(grid.size) // copies
    return part.tolist()
