"""What the runtime reports about devices, and the number of compiled programs."""

from __future__ import annotations

from typing import Final

import torch

from xla_core.compilation import program_table
from xla_core.contract.device_protocol import DeviceDescription
from xla_core.execution import runtime
from xla_core.support import caches

MSG_NAME: Final = "{device!r} is not the name of a device, such as 'CPU:0' or 'xla:0'"


def device_attributes(device: torch.device | str) -> dict[str, object]:
    """The attributes of one device of this process: ``name``, and those that its plugin adds.

    ``device`` is an ``xla`` device, or the runtime's name of a device of this process (``CPU:0``).
    """
    kind = runtime.device_type()
    local = runtime.client().local_devices()
    for description in local:
        if str(device).upper() == f"{kind}:{description.id}":
            return _attributes(kind, description)
    return _attributes(kind, local[runtime.trace_of(device).device.index])


def _attributes(kind: str, description: DeviceDescription) -> dict[str, object]:
    return {"name": f"{kind}:{description.id}", **description.attributes}


def parse_device_name(device: str) -> tuple[str, int]:
    """Split a device's name: ``"CPU:0"`` gives ``("CPU", 0)``. Raises RuntimeError for any other text."""
    kind, _, number = device.rpartition(":")
    if not kind or not number.isdecimal():
        raise RuntimeError(MSG_NAME.format(device=device))
    return kind, int(number)


def device_kind(device: torch.device | str | None = None) -> str:
    """The name of a device's hardware, such as ``TPU v5 lite`` or ``x86_64`` (default: the current device)."""
    trace = runtime.trace_of(device or None)
    return runtime.client().local_devices()[trace.device.index].kind


def cached_program_count() -> int:
    """How many compiled programs this process holds in memory."""
    return len(program_table.all_programs())


def clear_program_cache() -> None:
    """Forget all compiled programs of this process, and the steps recorded so far.

    Pending operations run first. The persistent cache is not changed.
    """
    for trace in runtime.traces():
        with trace.lock:
            trace.turns.run_all()
            trace.forget()
    caches.clear_all()
