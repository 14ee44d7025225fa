"""Plans of training steps over TPUs that are not here: ``xla-plan``, and the same as functions."""

from __future__ import annotations

__version__ = "0.1.0"
