"""torch_xla.utils.checkpoint: recomputing parts of a model in the backward pass."""

from __future__ import annotations

from xla_core.checkpointing import checkpoint as checkpoint
