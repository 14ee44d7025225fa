"""The generations of TPUs: what a chip is called, has, and how slices of it are named.

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

    ``number`` is what torch_xla's ``tpu.version()`` gives, ``library_name`` what libtpu's topologies
    are called. ``cores`` TensorCores of a chip are shown as ``devices`` devices; ``memory_bytes``
    is the HBM of one device that programs may use, as the compiler of libtpu 0.0.42 has it.
    ``dimensions`` of the network between chips are 2 or 3. ``counts_cores``: accelerator types
    (``v4-8``) count cores, not chips.
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
"""Other names, as accelerator types, device kinds and libtpu spell them."""

PCI_VENDOR: Final = "0x1ae0"
PCI_DEVICES: Final[Mapping[str, str]] = {
    "0x0027": "v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "v7x",
}
"""PCI device identifier to generation; v2 and v3 share theirs."""

# Chips of a slice to its network's shape, where the accelerator type leaves it open.
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

    Raises ValueError listing the names there are.
    """
    wanted = name.strip().lower().removeprefix("tpu").strip()
    entry = GENERATIONS.get(ALIASES.get(wanted, wanted)) or GENERATIONS.get(
        ALIASES.get(name.strip().lower(), "")
    )
    if entry is None:
        raise ValueError(f"{name!r} is no TPU generation; known are {', '.join(GENERATIONS)}")
    return entry


def parse_accelerator_type(text: str) -> tuple[Generation, tuple[int, ...]]:
    """Generation and shape of a slice by its accelerator type, as Cloud TPU spells it (``v5litepod-16``).

    Raises ValueError when it is none, or when its size has no usual shape.
    """
    name, _, count = text.strip().rpartition("-")
    if not name or not count.isdecimal():
        raise ValueError(f"{text!r} is no accelerator type such as v5litepod-16 or v4-8")
    chip = generation(name)
    chips = int(count) // chip.cores if chip.counts_cores else int(count)
    shapes = _FLAT if chip.dimensions == 2 else _CUBE
    if chips not in shapes:
        sizes = ", ".join(str(c * chip.cores if chip.counts_cores else c) for c in shapes)
        raise ValueError(f"{text!r}: a {chip.name} slice has one of these sizes: {sizes}")
    return chip, shapes[chips]
