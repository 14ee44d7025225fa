"""One program over a mesh of devices: the implementation of ``torch_xla.distributed.spmd``."""

from __future__ import annotations

__version__ = "0.1.0"
