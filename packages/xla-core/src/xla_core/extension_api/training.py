"""Steps of training: where they end, the gradients of several replicas, random states, files on the disk."""

from __future__ import annotations

from xla_core.api.xla_model import gradients, set_gradient_reducer, sync
from xla_core.execution.step_closures import wait as wait_for_closures
from xla_core.recording.random_state import get_state as random_state
from xla_core.recording.random_state import set_state as set_random_state
from xla_core.support.atomic_file import replacing, sync_folder
from xla_core.torch_features.checkpointing import checkpoint

__all__ = [
    "checkpoint",
    "gradients",
    "random_state",
    "replacing",
    "set_gradient_reducer",
    "set_random_state",
    "sync",
    "sync_folder",
    "wait_for_closures",
]
