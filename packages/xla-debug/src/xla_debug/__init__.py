"""Shows what happens on PyTorch's ``xla`` device, and why: metrics, recompilations, profiles, memory."""

from __future__ import annotations

__version__ = "0.1.0"
