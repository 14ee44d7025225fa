"""What the runtime tells of devices, and the programs that a process holds for them."""

from __future__ import annotations

from typing import Any, Final

import torch

from xla_core.compilation import program_table
from xla_core.execution import runtime
from xla_core.support import caches

MSG_NAME: Final = "{device!r} is not the name of a device, such as 'CPU:0' or 'xla:0'"


def device_attributes(device: torch.device | str) -> dict[str, object]:
    """What the runtime tells of one device of this process: ``name``, and what its plugin adds.

    ``device`` is an ``xla`` device, or the runtime's name of one of this process (``CPU:0``).
    """
    kind = runtime.device_type()
    local = runtime.client().local_devices()
    for description in local:
        if str(device).upper() == f"{kind}:{description.id}":
            return _attributes(kind, description)
    return _attributes(kind, local[runtime.trace_of(device).device.index])


def _attributes(kind: str, description: Any) -> dict[str, object]:
    return {"name": f"{kind}:{description.id}", **description.attributes}


def parse_device_name(device: str) -> tuple[str, int]:
    """``("CPU", 0)`` of ``"CPU:0"``. Raises RuntimeError for text that is no such name."""
    kind, _, number = device.rpartition(":")
    if not kind or not number.isdecimal():
        raise RuntimeError(MSG_NAME.format(device=device))
    return kind, int(number)


def device_kind(device: torch.device | str | None = None) -> str:
    """The hardware's name (``TPU v5 lite``, ``x86_64``) of a device (default: the current one)."""
    trace = runtime.trace_of(device or None)
    return runtime.client().local_devices()[trace.device.index].kind


def cached_program_count() -> int:
    """How many compiled programs this process holds in memory."""
    return len(program_table.all_programs())


def clear_program_cache() -> None:
    """Forget every compiled program of this process, and the steps recorded so far.

    What is pending is run first. The persistent cache stays.
    """
    for trace in runtime.traces():
        with trace.lock:
            trace.turns.run_all()
            trace.forget()
    caches.clear_all()
