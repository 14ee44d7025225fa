"""What several devices shown as one device are made of: xla-spmd's mesh, a vendor's own grouping.

An extension hands its backends over with the hook ``xla_core_make_backends`` and calls ``runtime.reattach``
when its answer changes. A backend subclasses ``DeviceBackend``; it lays a step out with a ``Layout``, and keeps
programs of its own in a ``Table`` (``hold`` counts them among the process's, ``make_room`` forgets others).
"""

from __future__ import annotations

from xla_core.compilation.program_table import hold, make_room
from xla_core.execution.device_backend import DeviceBackend
from xla_core.recording.evictable import Kept, Table
from xla_core.recording.program_layout import Layout
from xla_core.recording.storage import Backend, Recorder, Storage

__all__ = [
    "Backend",
    "DeviceBackend",
    "Kept",
    "Layout",
    "Recorder",
    "Storage",
    "Table",
    "hold",
    "make_room",
]
