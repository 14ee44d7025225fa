"""The rates and sizes of TPU chips by generation, from which estimates are made.

Sources: https://cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and /tpu7x ("Key specifications": peak compute
in bfloat16, HBM capacity and bandwidth, and the interchip interconnect's bandwidth, given there in gigabits
per second for all links of a chip in one direction). ``dcn`` is the network of a host (200 Gbit/s with four v4
or v5p chips, 100 with four v5e, 400 with four v6e or v7x chips: the same pages' virtual machines).

``multipliers`` convert cycles, as libtpu counts them, to seconds: it is the number of multiplications and additions
in one such cycle at the peak. For v4, v5e and v5p these are the matrix units of the pages above (128 x 128 each),
and libtpu 0.0.42 counts a product of 8192 x 8192 matrices at 88 to 91 % of that rate. For v6e and v7x the pages
give no clock, and libtpu's counts fit none of their numbers; the value here is the one at which the same product
has 90 %.
``tests/planning/test_clock.py`` compares all of them with the compiler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

MSG_NO_CHIP: Final = "there are no figures for {name!r}; xla_plan.planning.chips has {known}"

_GIB: Final = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """One chip.

    ``flops`` is FLOP/s in bfloat16, ``hbm_bytes`` the size of HBM, ``hbm`` its rate. A chip has ``links`` to others
    (two for each dimension of the network); ``ici`` is the rate of all links in one direction, ``dcn`` the chip's
    share of its host's network. Rates are bytes per second. ``multipliers`` are explained above. The runtime shows
    a chip as ``devices`` devices.
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
        """Cycles per second as libtpu counts them, at which the matrix units reach ``flops``."""
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
"""Stands for devices that are not in the table; only for comparing programs for one device with each other.

A multiplication and addition takes a tenth of the time of reading a float, and sending a float twice that time.
"""

_KINDS: Final[Mapping[str, str]] = {
    "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p",
    "TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU7x": "v7x", "TPU v7x": "v7x",
}  # fmt: skip
"""The chips by the devices' own names, as in libtpu 0.0.42 and jax's pages."""


def chip_of_kind(kind: str) -> Chip:
    """The chip of a device's own name (``TPU v5 lite``), or ``NOMINAL`` if it is not in the table."""
    return CHIPS[_KINDS[kind]] if kind in _KINDS else NOMINAL


def chip_of(topology: str) -> Chip:
    """The chip of a topology (``v5e:4x4``, ``v5litepod-16``). Raises ValueError if it is not in the table."""
    name = topology.lower().split(":")[0].rpartition("-")[0] or topology.lower().split(":")[0]
    known = {"v5litepod": "v5e", "tpu7x": "v7x"}.get(name, name)
    if known not in CHIPS:
        raise ValueError(MSG_NO_CHIP.format(name=topology, known=", ".join(CHIPS)))
    return CHIPS[known]
