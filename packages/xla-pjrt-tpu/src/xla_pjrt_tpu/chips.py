"""Finds the TPU chips of this machine through the operating system."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import xla_pjrt_tpu.settings as settings
from xla_pjrt_tpu.hardware import GENERATIONS, PCI_DEVICES, PCI_VENDOR, generation

_PCI_FOLDER: Final = Path("/sys/bus/pci/devices")
_DEVICE_FOLDER: Final = Path("/dev")
_ENVIRONMENT: Final = re.compile(
    r"(TPU_(ACCELERATOR_TYPE|WORKER_\w+|PROCESS_\w+|VISIBLE_CHIPS|\w*BOUNDS|NAME|TOPOLOGY)"
    r"|CLOUD_TPU_TASK_ID|KUBERNETES_SERVICE_HOST|ACCELERATOR_TYPE)"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Chips:
    """The TPU chips on the PCI bus: ``count`` chips of the generation ``version``, None without a chip.

    ``pci_devices`` is the number of all devices on the bus. ``nodes`` are the driver's device files.
    """

    count: int
    version: str | None
    pci_devices: int
    nodes: tuple[str, ...]


def find_chips(pci: Path = _PCI_FOLDER, dev: Path = _DEVICE_FOLDER) -> Chips:
    """Search the PCI bus and the driver's device files in the folders ``pci`` and ``dev``; uses no network."""
    identifiers = [
        (_read(folder / "vendor"), _read(folder / "device"))
        for folder in (sorted(pci.iterdir()) if pci.is_dir() else ())
    ]
    versions = [
        PCI_DEVICES[device]
        for vendor, device in identifiers
        if vendor == PCI_VENDOR and device in PCI_DEVICES
    ]
    nodes = [*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")] if dev.is_dir() else []
    version = versions[0] if versions else None
    return Chips(len(versions), version, len(identifiers), tuple(sorted(map(str, nodes))))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def version_name(options: Mapping[str, str], chips: Chips) -> str | None:
    """The generation of this machine's TPU, by the accelerator type in ``options`` or else by the PCI bus.

    None if there is no TPU. Raises ValueError for an unknown accelerator type.
    """
    for variable in (settings.ACCELERATOR_TYPE.name, "ACCELERATOR_TYPE"):
        text = options.get(variable, "").strip()
        if text:
            return generation(text.rpartition("-")[0] or text).name
    return chips.version if chips.version in GENERATIONS else None


def describe(options: Mapping[str, str], chips: Chips) -> str:
    """A phrase for error messages: what was searched, and what was found."""
    names = sorted(name for name in options if _ENVIRONMENT.fullmatch(name))
    nodes = f"device files {', '.join(chips.nodes)}" if chips.nodes else "no device files"
    variables = f"the variables {', '.join(names)}" if names else "no TPU variable"
    return (
        f"{chips.count} TPU chips among {chips.pci_devices} devices on the PCI bus, {nodes} "
        f"(/dev/accel*, /dev/vfio/*), {variables} in the environment"
    )
