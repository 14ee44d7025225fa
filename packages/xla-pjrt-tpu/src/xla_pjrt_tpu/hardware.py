"""The generations of TPUs: the names and figures of chips, and the names of slices.

Sources: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm and the pages of the versions
(cores of a chip, accelerator types), the PCI identifiers of the Linux driver.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

_GIB: Final = float(1 << 30)


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """One TPU version.

    ``number`` is the result of torch_xla's ``tpu.version()``, and ``library_name`` the name in libtpu's topologies.
    The ``cores`` TensorCores of a chip appear as ``devices`` devices. ``memory_bytes`` is the HBM of one
    device that programs may use, according to the compiler of libtpu 0.0.42 (those of 0.0.48 and 0.0.50
    keep 0.01 GiB more of v5p, v6e and v7x for themselves). ``dimensions`` (2 or 3) are those of the network
    between chips. ``counts_cores``: accelerator types such as ``v4-8`` count cores, not chips.
    """

    name: str
    number: int
    library_name: str
    cores: int
    devices: int
    memory_bytes: int
    dimensions: int
    counts_cores: bool
    chips_per_host: tuple[int, int, int] = (2, 2, 1)


GENERATIONS: Final[Mapping[str, Generation]] = {
    g.name: g
    for g in (
        Generation("v2", 2, "v2", 2, 2, round(7.48 * _GIB), 2, True),
        Generation("v3", 3, "v3", 2, 2, round(15.48 * _GIB), 2, True),
        Generation("v4", 4, "v4", 2, 1, round(31.75 * _GIB), 3, True),
        Generation("v5e", 5, "v5e", 1, 1, round(15.75 * _GIB), 2, False),
        Generation("v5p", 5, "v5p", 2, 1, round(95.74 * _GIB), 3, True),
        Generation("v6e", 6, "v6e", 1, 1, round(31.25 * _GIB), 2, False),
        Generation("v7x", 7, "tpu7x", 2, 2, round(94.75 * _GIB), 3, True),
    )
}

ALIASES: Final[Mapping[str, str]] = {
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "v5 lite": "v5e",
    "v5": "v5p",
    "v6 lite": "v6e",
    "tpu7x": "v7x",
    "7x": "v7x",
}
"""Other names of generations, in accelerator types, device kinds and libtpu."""

PCI_VENDOR: Final = "0x1ae0"
PCI_DEVICES: Final[Mapping[str, str]] = {
    "0x0027": "v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "v7x",
}
"""The generation by PCI device identifier; v2 and v3 have the same."""

# The shape of a slice's network by its number of chips, for accelerator types, which do not contain the shape.
_FLAT: Final[Mapping[int, tuple[int, ...]]] = {
    1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16),
    256: (16, 16), 512: (16, 32), 1024: (32, 32),
}  # fmt: skip
_CUBE: Final[Mapping[int, tuple[int, ...]]] = {
    4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4), 128: (4, 4, 8),
    256: (4, 8, 8), 512: (8, 8, 8), 768: (8, 8, 12), 1024: (8, 8, 16), 2048: (8, 16, 16),
    4096: (16, 16, 16),
}  # fmt: skip


def generation(name: str) -> Generation:
    """The generation called ``name``: ``v5e``, ``v5litepod``, or a device kind (``TPU v5 lite``).

    Raises ValueError for another name, which lists the generations.
    """
    short = name.strip().lower().removeprefix("tpu").strip()
    entry = GENERATIONS.get(ALIASES.get(short, short)) or GENERATIONS.get(
        ALIASES.get(name.strip().lower(), "")
    )
    if entry is None:
        known = ", ".join(GENERATIONS)
        raise ValueError(f"{name!r} is not a TPU generation; the generations are {known}")
    return entry


def parse_accelerator_type(text: str) -> tuple[Generation, tuple[int, ...]]:
    """The generation and the shape of the slice with the accelerator type ``text``, such as ``v5litepod-16``.

    Raises ValueError for other text, or for a size that Cloud TPU does not offer.
    """
    name, _, count = text.strip().rpartition("-")
    if not name or not count.isdecimal():
        raise ValueError(f"{text!r} is not an accelerator type such as v5litepod-16 or v4-8")
    chip = generation(name)
    chips = int(count) // chip.cores if chip.counts_cores else int(count)
    shapes = _FLAT if chip.dimensions == 2 else _CUBE
    if chips not in shapes:
        sizes = ", ".join(str(c * chip.cores if chip.counts_cores else c) for c in shapes)
        raise ValueError(f"{text!r}: a {chip.name} slice has one of these sizes: {sizes}")
    return chip, shapes[chips]
