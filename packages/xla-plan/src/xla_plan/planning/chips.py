"""What one TPU chip can do, by generation: the one table that estimates are made from.

Sources: https://cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and /tpu7x ("Key specifications": peak compute
in bfloat16, HBM capacity and bandwidth, and the interchip interconnect's bandwidth, given there in gigabits
per second for all links of a chip in one direction). ``dcn`` is the network of a host (200 Gbit/s with four v4
or v5p chips, 100 with four v5e, 400 with four v6e or v7x chips: the same pages' virtual machines).

``multipliers`` turn cycles as libtpu counts them into seconds: products of two numbers that are added in one such
cycle at the peak. Of v4, v5e and v5p they are the matrix units' of the pages above (128 x 128 each), and libtpu
0.0.42 gives a product of 8192 x 8192 matrices 88 to 91 % of that rate. Of v6e and v7x the pages name no clock,
and libtpu's counts fit none of theirs: the number here is the one with which it gives the same product 90 %.
``tests/test_clock.py`` holds all of them against the compiler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

MSG_NO_CHIP: Final = "there are no figures for {name!r}; xla_plan.planning.chips has {known}"

_GIB: Final = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """One chip: ``flops`` a second in bfloat16, bytes of HBM, bytes a second to HBM and to other chips.

    ``links`` leave a chip (two for each dimension of its network), ``ici`` is the rate of all of them in
    one direction; ``dcn`` the share that one chip has of its host's network. ``devices`` of a chip are shown.
    """

    name: str
    flops: float
    hbm_bytes: int
    hbm: float
    ici: float
    links: int
    dcn: float
    multipliers: int
    devices: int = 1

    @property
    def clock(self) -> float:
        """Cycles a second, as libtpu counts them: those in which the matrix units reach ``flops``."""
        return self.flops / (2 * self.multipliers)


CHIPS: Final[Mapping[str, Chip]] = {
    chip.name: chip
    for chip in (
        Chip("v4", 275e12, 32 * _GIB, 1228e9, 2400e9 / 8, 6, 6.25e9, 8 * 128 * 128),
        Chip("v5e", 197e12, 16 * _GIB, 819e9, 1600e9 / 8, 4, 3.125e9, 4 * 128 * 128),
        Chip("v5p", 459e12, 95 * _GIB, 2765e9, 4800e9 / 8, 6, 6.25e9, 8 * 128 * 128),
        Chip("v6e", 918e12, 32 * _GIB, 1640e9, 3584e9 / 8, 4, 12.5e9, 3 * 256 * 256),
        Chip("v7x", 2307e12, 192 * _GIB, 7380e9, 9600e9 / 8, 6, 12.5e9, 448_000, devices=2),
    )
}

NOMINAL: Final = Chip("nominal", 1e11, 1 << 62, 2e10, 1e10, 2, 1e9, 1)
"""Stands for devices that this table does not know: good for comparing programs of one device, for nothing else.

A multiplication and addition takes a tenth of the time of reading a float, which takes half of that of sending one.
"""

_KINDS: Final[Mapping[str, str]] = {
    "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p",
    "TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU7x": "v7x", "TPU v7x": "v7x",
}  # fmt: skip
"""The names that devices call themselves, as libtpu 0.0.42 and jax's pages have them."""


def chip_of_kind(kind: str) -> Chip:
    """The chip of a device's own name (``TPU v5 lite``); ``NOMINAL`` for what is no TPU of the table."""
    return CHIPS[_KINDS[kind]] if kind in _KINDS else NOMINAL


def chip_of(topology: str) -> Chip:
    """The chip of a topology's name (``v5e:4x4``, ``v5litepod-16``). Raises ValueError for another."""
    name = topology.lower().split(":")[0].rpartition("-")[0] or topology.lower().split(":")[0]
    known = {"v5litepod": "v5e", "tpu7x": "v7x"}.get(name, name)
    if known not in CHIPS:
        raise ValueError(MSG_NO_CHIP.format(name=topology, known=", ".join(CHIPS)))
    return CHIPS[known]
