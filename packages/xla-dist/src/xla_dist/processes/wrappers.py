"""``MpModelWrapper`` and ``MpSerialExecutor``: one model for all processes of a host, and one process at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
import torch.multiprocessing
from torch import nn

from xla_core.extension_api import runtime

T = TypeVar("T")


def _lock() -> AbstractContextManager[object]:
    # a lock of the method "spawn" works in processes that any method has started
    return torch.multiprocessing.get_context("spawn").Lock()


class MpModelWrapper:
    """Holds a model that was created before the processes start, and moves it to the device of each process.

    One process at a time moves it, so that host memory holds few copies at once: with ``start_method='fork'`` the
    processes share the model's pages until then.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._lock = _lock()

    def to(self, device: torch.device | str) -> nn.Module:
        """Move the model to ``device``, and return it; waits while another process does so."""
        with self._lock:
            self._model.to(device)
        return self._model


class MpSerialExecutor:
    """Lets one process at a time call a function, such as one that downloads a data set."""

    def __init__(self) -> None:
        self._lock = _lock()

    def run(self, fn: Callable[[], T]) -> T:
        """Call ``fn()``, and return its result; waits while another process with this object calls a function."""
        with self._lock:
            return fn()


def create_optimized_replica_groups() -> list[list[int]]:
    """The replica groups of a collective over all replicas: one group, in the order of the ordinals."""
    return [list(range(runtime.world_size()))]
