"""``DataParallel``: one thread per device of this process trains its copy of a network on its part of the data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn

from xla_core.contract.foreign_values import ForeignObject
from xla_core.extension_api import runtime
from xla_core.extension_api.operators import Tree
from xla_dist.data_parallel.parallel_loader import ParallelLoader
from xla_dist.processes.thread_replicas import run_threads

T = TypeVar("T")


class Context:
    """The object in which the loop of one device keeps values from one call to the next, as attributes.

    ``device`` is the loop's device, ``num_replicas`` (default: 1) the number of all devices.
    """

    def __init__(self, device: torch.device, num_replicas: int = 1) -> None:
        self.num_replicas = num_replicas
        self.device = device

    def getattr_or(self, name: str, defval: object) -> object:
        """The attribute ``name``. If there is none, it is set to ``defval``, or ``defval()`` if callable."""
        if not hasattr(self, name):
            setattr(self, name, defval() if callable(defval) else defval)
        return getattr(self, name)


class _Numbered:
    """The pairs ``(number, batch)`` of a loader's batches, with the length that ``count()`` returns."""

    def __init__(self, batches: Iterable[object], count: Callable[[], int]) -> None:
        self._batches = batches
        self._count = count

    def __iter__(self) -> Iterator[tuple[int, Tree]]:
        return enumerate(self._batches)

    def __len__(self) -> int:
        return self._count()


class DataParallel:
    """Trains copies of ``network``, a module or a function that creates one, in one thread per device.

    ``device_ids`` are the devices (default: all ``xla`` devices). With ``device_ids=[]`` the loop runs once, in
    this thread, on PyTorch's own CPU device.
    """

    def __init__(
        self,
        network: nn.Module | Callable[[], nn.Module],
        device_ids: Sequence[torch.device | str] | None = None,
    ) -> None:
        chosen = runtime.devices() if device_ids is None else device_ids
        self._device_ids = [torch.device(d) for d in chosen]
        module = network if isinstance(network, nn.Module) else network()
        places = self._device_ids or [torch.device("cpu")]
        self._models = [copy.deepcopy(module).to(device) for device in places]
        self._contexts = [Context(device, len(places)) for device in places]

    @property
    def devices(self) -> list[torch.device]:
        """The devices of the copies; empty if the loop runs on PyTorch's own CPU device."""
        return list(self._device_ids)

    @property
    def models(self) -> list[nn.Module]:
        """The copies, in the order of their devices."""
        return list(self._models)

    def __call__(
        self,
        loop_fn: Callable[..., T],
        loader: ForeignObject,
        fixed_batch_size: bool = False,
        batchdim: int = 0,
    ) -> list[T]:
        """Call ``loop_fn(model, loader, device, context)`` for each device; returns the results in their order.

        The loop's ``loader`` yields ``(number, batch)`` with the device's own batches of ``loader``, whose batches
        are on the CPU, and ends the step between them. The last batches are dropped if there is not one for each
        device. ``fixed_batch_size`` and ``batchdim`` have no effect: a batch of another size compiles another
        program. Raises what the first loop that failed raised.
        """
        del fixed_batch_size
        if not self._device_ids:
            batches = _Numbered(loader, lambda: len(loader))
            return [loop_fn(self._models[0], batches, torch.device("cpu"), self._contexts[0])]
        parallel = ParallelLoader(loader, self._device_ids, batchdim=batchdim)

        def run(ordinal: int) -> T:
            device = self._device_ids[ordinal]
            mine = parallel.per_device_loader(device)
            batches = _Numbered(mine, parallel.per_device_samples)
            return loop_fn(self._models[ordinal], batches, device, self._contexts[ordinal])

        try:
            return run_threads(self._device_ids, run)
        finally:
            parallel.close()
