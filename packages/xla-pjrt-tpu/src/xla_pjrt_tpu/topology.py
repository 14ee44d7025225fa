"""Names of topologies to compile for: ``v5e:4x4``, ``v5litepod-16``, ``v4:2x2x1``, ``v6e:16x16*2``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Final

import xla_pjrt_tpu.settings as settings
from xla_pjrt_tpu.hardware import Generation, generation, parse_accelerator_type

MSG_BAD_TOPOLOGY: Final = (
    "XLA_AOT_TOPOLOGY={text!r} is not a TPU topology: {reason}. Write a generation and the shape of its "
    "chips (v5e:4x4, v4:2x2x1, v5p:2x2x2), an accelerator type (v5litepod-16), and *N for N slices"
)
_FORM: Final = re.compile(r"(?P<name>[\w ]+):(?P<shape>\d+(x\d+){1,2})")


@dataclasses.dataclass(frozen=True, slots=True)
class TpuTopology:
    """TPU chips to compile for: their generation, the shape of a slice, and the number of slices (default: 1).

    ``chip_config`` is libtpu's name for the way in which v4 chips are used: as one device, or as two.
    """

    generation: Generation
    shape: tuple[int, ...]
    slices: int = 1
    chip_config: str | None = None

    @property
    def name(self) -> str:
        """The name of one slice, such as ``v5e:4x4``."""
        return f"{self.generation.name}:{'x'.join(map(str, self.shape))}"

    @property
    def library_name(self) -> str:
        """The name of one slice in libtpu."""
        return f"{self.generation.library_name}:{'x'.join(map(str, self.shape))}"

    @property
    def memory_bytes(self) -> int:
        """The HBM of one device in bytes: half a v4 chip's if its two cores are separate devices."""
        split = self.chip_config == "default" and self.generation.devices < self.generation.cores
        return self.generation.memory_bytes // (self.generation.cores if split else 1)

    def library_options(self) -> dict[str, str | int | list[int]]:
        """Options for libtpu in addition to the name."""
        shape = (*self.shape, 1, 1)[:3]
        host = self.generation.chips_per_host
        options: dict[str, str | int | list[int]] = {
            "chips_per_host_bounds": [min(a, b) for a, b in zip(shape, host, strict=True)]
        }
        if self.chip_config is not None:
            options["chip_config_name"] = self.chip_config
        if self.slices > 1:
            options["num_slices"] = self.slices
        return options


def parse_topology(text: str, options: Mapping[str, str]) -> TpuTopology:
    """The topology that ``text`` names; ``TPU_MEGACORE`` in ``options`` chooses how v4 chips are used.

    Raises ValueError, which shows the accepted forms.
    """
    name, _, count = text.partition("*")
    try:
        if count and not (count.strip().isdecimal() and int(count) > 0):
            raise ValueError(f"{count!r} is not a number of slices")
        chip, shape = _parse_slice(name.strip())
    except ValueError as error:
        raise ValueError(MSG_BAD_TOPOLOGY.format(text=text, reason=error)) from None
    config = settings.MEGACORE.get(options).lower() if chip.name == "v4" else None
    return TpuTopology(chip, shape, int(count or 1), config)


def _parse_slice(text: str) -> tuple[Generation, tuple[int, ...]]:
    match = _FORM.fullmatch(text)
    if match is None:
        return parse_accelerator_type(text)
    chip = generation(match["name"])
    shape = tuple(map(int, match["shape"].split("x")))
    if len(shape) == 2 and chip.dimensions == 3:
        raise ValueError(f"{chip.name} chips form a network of three dimensions")
    if min(shape) < 1:
        raise ValueError("a dimension is 0")
    return chip, shape
