"""A thread per device of one process, each training its copy of a network on its part of the data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from xla_core.extension_api import runtime
from xla_core.extension_api.operators import Tree
from xla_dist.data_parallel.parallel_loader import ParallelLoader
from xla_dist.processes.thread_replicas import run_threads


class Context:
    """What a loop keeps from one call to the next: attributes of its own, per device."""

    def __init__(self, device: torch.device, num_replicas: int = 1) -> None:
        self.num_replicas = num_replicas
        self.device = device

    def getattr_or(self, name: str, defval: object) -> object:
        """The attribute ``name``; if there is none yet, ``defval`` (called, if it can be) becomes it."""
        if not hasattr(self, name):
            setattr(self, name, defval() if callable(defval) else defval)
        return getattr(self, name)


class _Numbered:
    """A loader's batches as ``(number, batch)``, and its length."""

    def __init__(self, batches: Iterable[object], count: Callable[[], int]) -> None:
        self._batches = batches
        self._count = count

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return enumerate(self._batches)

    def __len__(self) -> int:
        return self._count()


class DataParallel:
    """Copies of ``network`` (a module, or what makes one) on ``device_ids`` (default: all ``xla`` devices).

    Calling it with ``loop_fn(model, loader, device, context)`` and a loader of CPU batches runs the
    loop in a thread per device; ``loader`` gives ``(number, batch)``, every device its own batches, and
    ends the step between them. ``device_ids=[]`` runs the loop once, on PyTorch's own CPU device.
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
        """The devices of the copies; empty on PyTorch's own CPU."""
        return list(self._device_ids)

    @property
    def models(self) -> list[nn.Module]:
        """The copies, in the order of their devices."""
        return list(self._models)

    def __call__(
        self,
        loop_fn: Callable[..., object],
        loader: Any,
        fixed_batch_size: bool = False,
        batchdim: int = 0,
    ) -> list[Any]:
        """What the loop returned for each device. Raises what the first failing loop raised.

        A last incomplete round of batches is dropped. ``fixed_batch_size`` and ``batchdim`` are accepted
        for torch_xla's sake: a batch of another size compiles another program.
        """
        del fixed_batch_size
        if not self._device_ids:
            batches = _Numbered(loader, lambda: len(loader))
            return [loop_fn(self._models[0], batches, torch.device("cpu"), self._contexts[0])]
        parallel = ParallelLoader(loader, self._device_ids, batchdim=batchdim)

        def run(ordinal: int) -> Tree:
            device = self._device_ids[ordinal]
            mine = parallel.per_device_loader(device)
            batches = _Numbered(mine, parallel.per_device_samples)
            return loop_fn(self._models[ordinal], batches, device, self._contexts[ordinal])

        try:
            return run_threads(self._device_ids, run)
        finally:
            parallel.close()
