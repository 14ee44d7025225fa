"""torch_xla.utils.checkpoint: recomputing parts of a model in the backward pass."""

from __future__ import annotations

from xla_core.torch_features.checkpointing import CheckpointFunction as CheckpointFunction
from xla_core.torch_features.checkpointing import checkpoint as checkpoint
from xla_core.torch_features.checkpointing import get_device_states as get_device_states
from xla_core.torch_features.checkpointing import set_device_states as set_device_states
