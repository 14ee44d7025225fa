"""Where autograd is: which backward pass runs, and what it is to do when it ends."""

from __future__ import annotations

from xla_core.torch_bridge.torch_private import (
    after_backward,
    backward_sequence,
    current_backward,
    next_sequence,
)

__all__ = [
    "after_backward",
    "backward_sequence",
    "current_backward",
    "next_sequence",
]
