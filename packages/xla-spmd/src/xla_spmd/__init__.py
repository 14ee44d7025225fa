"""One program over a mesh of devices: what ``torch_xla.distributed.spmd`` names."""

from __future__ import annotations

__version__ = "0.1.0"
