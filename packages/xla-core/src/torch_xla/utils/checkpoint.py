"""torch_xla.utils.checkpoint: recomputing parts of a model in the backward pass."""

from __future__ import annotations

from xla_core.torch_features.checkpointing import checkpoint as checkpoint
