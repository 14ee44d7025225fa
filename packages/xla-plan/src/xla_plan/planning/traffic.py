"""The arithmetic of the search: what a chip sends in a step, by the shapes of parameters and how they are split."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from xla_plan.steps.candidate import Mesh

_OF_TOKENS: Final = ("data", "fsdp", "sequence", "expert")
"""The axes that split tokens: along them, copies of a parameter have different gradients."""
_GATHERED: Final = ("fsdp", "sequence", "expert")
"""The axes along which a split parameter is gathered where it is used."""
_GATHERS: Final = 2
"""How often a split parameter is gathered: for the forward and for the backward pass."""
_VISITS: Final = 2
"""The experts that a token goes to, as in GShard and Mixtral; the shapes do not tell."""
_EXCHANGES: Final = 4 / 3
"""How often tokens are sent for each weight of an expert: four times for the three of a gated MLP."""
_HALF: Final = 2
"""Bytes of an element of gathered parameters and of activations, as steps compute in bfloat16."""
_FULL: Final = 4
"""Bytes of an element of a gradient."""


class Traffic:
    """The bytes that one chip sends over the network of its slice, ``ici``, and between slices, ``dcn``.

    ``mesh`` has the sizes of the axes, of which the last one varies fastest, over all chips of ``slices`` equal
    slices, one slice after the other. Sums and gathers over several slices go over both networks: what a slice has
    summed is sent to the others in parts, one by each of its chips.
    """

    def __init__(self, mesh: Mesh, slices: int) -> None:
        self.sizes = dict(mesh)
        self.ici = self.dcn = 0.0
        of_slice = math.prod(self.sizes.values()) / slices
        self._spans: dict[str, float] = {}
        inner = 1
        for axis, size in reversed(mesh):
            # the slices that a step along the axis, and all of its chips, reach over
            self._spans[axis] = max(1.0, inner * size / of_slice) / max(1.0, inner / of_slice)
            inner *= size

    def gather(self, nbytes: float, axes: Iterable[str]) -> None:
        """Parts along ``axes`` are gathered to ``nbytes``, or ``nbytes`` are summed and left in parts."""
        chips, slices = self._over(axes)
        self.ici += nbytes * _others(chips / slices)
        self.dcn += nbytes * (slices - 1) / chips

    def all_reduce(self, nbytes: float, axes: Iterable[str]) -> None:
        """Values of ``nbytes`` on each chip along ``axes`` are summed."""
        chips, slices = self._over(axes)
        self.ici += 2 * nbytes * _others(chips / slices)
        self.dcn += 2 * nbytes * _others(slices) * slices / chips

    def all_to_all(self, nbytes: float, axes: Iterable[str]) -> None:
        """Each chip along ``axes`` sends ``nbytes`` in equal parts to all of them."""
        chips, slices = self._over(axes)
        self.ici += nbytes * (_others(chips) - _others(slices))
        self.dcn += nbytes * _others(slices)

    def _over(self, axes: Iterable[str]) -> tuple[float, float]:
        there = [axis for axis in axes if axis in self.sizes]
        return product(self.sizes, there), math.prod(self._spans[axis] for axis in there)


def sent(
    weights: Sequence[Weight], mesh: Mesh, slices: int, flops: float, iterations: int = 1
) -> Traffic:
    """What a chip sends in a step of ``flops``.

    Along an axis that splits tokens, a parameter is either split, and gathered for each pass, or copied, and the
    gradients of the copies are summed. Experts stay where they are: tokens are sent to them and back, in both
    passes. Along ``tensor`` activations are summed: for each split weight, once in one of the two passes, with the
    size of its unsplit side. Along ``sequence`` they are sent from all to all about as often. The stages of a
    pipeline gather their weights in each of its ``iterations``.
    """
    traffic = Traffic(mesh, slices)
    sizes = traffic.sizes
    visited = sum(weight.visited for weight in weights) or 1
    tokens = flops / (6 * visited) / math.prod(sizes.values())
    for weight in weights:
        whole = math.prod(weight.part) * product(sizes, weight.gathered)
        times = iterations if "stage" in weight.axes else 1
        traffic.gather((_GATHERS * _HALF * times + _FULL) * whole, weight.gathered)
        traffic.all_reduce(_FULL * math.prod(weight.part), set(_OF_TOKENS) - weight.axes)
        if len(weight.whole) < 2:
            continue
        activations = weight.layers * _HALF * tokens * min(weight.whole[-2:])
        if weight.of_experts:
            activations *= _VISITS
            traffic.all_to_all(_EXCHANGES * activations, ["expert"])
        else:
            traffic.all_to_all(activations, ["sequence"])
        if "tensor" in weight.axes:
            traffic.all_reduce(sizes["tensor"] * activations, ["tensor"])
    return traffic


def padding(weights: Sequence[Weight], sizes: Mapping[str, int]) -> float:
    """How much more is computed because experts, heads or hidden units do not divide among the chips."""
    visited = sum(weight.visited for weight in weights)
    return sum(w.visited * w.padding(sizes) for w in weights) / visited if visited else 1.0


def product(sizes: Mapping[str, int], axes: Iterable[str]) -> int:
    """The number of chips along ``axes``, of which those that the mesh lacks have one."""
    return math.prod(sizes.get(axis, 1) for axis in axes)


def _others(count: float) -> float:
    """The share of a value that is on other chips, of ``count`` that have a part each."""
    return 1 - 1 / count


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter: its ``whole`` shape, that of one chip's ``part``, and the axes that split each dimension.

    Those of experts are split along ``expert`` in a dimension in front of the last two; other parameters may be
    split over it, too, and are gathered.
    """

    whole: Sequence[int]
    part: Sequence[int]
    dimensions: Sequence[Sequence[str]]

    @property
    def axes(self) -> set[str]:
        """The axes that split it."""
        return {axis for axes in self.dimensions for axis in axes}

    @property
    def of_experts(self) -> bool:
        """Whether tokens are sent to it."""
        return any("expert" in axes for axes in self.dimensions[:-2])

    @property
    def gathered(self) -> set[str]:
        """The axes along which its parts are gathered."""
        return self.axes & set(_GATHERED) - ({"expert"} if self.of_experts else set())

    @property
    def layers(self) -> int:
        """How many layers it is stacked from."""
        return math.prod(self.whole[: -3 if self.of_experts else -2])

    @property
    def visited(self) -> float:
        """How many of its elements a token is multiplied with."""
        share = _VISITS / self.whole[-3] if self.of_experts else 1.0
        return math.prod(self.whole) * min(share, 1.0)

    def padding(self, sizes: Mapping[str, int]) -> float:
        """How much larger all parts of it are than the whole, along the axes that split its products."""
        computed = {"tensor", "expert"} - self.gathered
        return math.prod(
            part * product(sizes, axes) / whole
            for part, whole, axes in zip(self.part, self.whole, self.dimensions, strict=True)
            if not computed.isdisjoint(axes)
        )
