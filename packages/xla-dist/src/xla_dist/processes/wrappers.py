"""Helpers around processes: one model for all of them, one process at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.multiprocessing
from torch import nn

from xla_core.extension_api import runtime

T = TypeVar("T")


def _lock() -> Any:
    # of the method "spawn": it reaches processes that are started by any method
    return torch.multiprocessing.get_context("spawn").Lock()


class MpModelWrapper:
    """Holds a model made once, before the processes start, and moves it to each one's device.

    One process at a time, so that host memory holds few copies at once (with
    ``start_method='fork'`` the pages are shared until then).
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._lock = _lock()

    def to(self, device: torch.device | str) -> nn.Module:
        """The model on ``device``."""
        with self._lock:
            self._model.to(device)
        return self._model


class MpSerialExecutor:
    """Lets one process at a time run a function, such as a download or the making of a data set."""

    def __init__(self) -> None:
        self._lock = _lock()

    def run(self, fn: Callable[[], T]) -> T:
        """What ``fn()`` returns, while no other process that has this object runs one."""
        with self._lock:
            return fn()


def create_optimized_replica_groups() -> list[list[int]]:
    """Replica groups for collectives over all replicas: one group, in ordinal order."""
    return [list(range(runtime.world_size()))]
