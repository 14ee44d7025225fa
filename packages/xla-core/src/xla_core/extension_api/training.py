"""Steps of training: where they end, and the gradients of several replicas."""

from __future__ import annotations

from xla_core.api.xla_model import gradients, set_gradient_reducer, sync
from xla_core.execution.step_closures import wait as wait_for_closures
from xla_core.torch_features.checkpointing import checkpoint

__all__ = [
    "checkpoint",
    "gradients",
    "set_gradient_reducer",
    "sync",
    "wait_for_closures",
]
