"""Plans training steps for TPUs without having them: the command ``xla-plan``, and its functions."""

from __future__ import annotations

__version__ = "0.1.0"
