"""Loaders whose threads read and upload batches while the device computes."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import torch

from xla_core.contract.foreign_values import Attribute, ForeignObject
from xla_core.extension_api import runtime, tensors, training
from xla_core.extension_api.operators import Tree
from xla_dist.data_parallel.channels import CLOSED, Channel, UserCounts

_JOIN_SECONDS: Final = 10.0

MSG_CLOSED: Final = "this ParallelLoader is closed (its loops have ended); create a new one"
MSG_DEVICE: Final = "this ParallelLoader has no queue for {device}; it has {known}"


class _Failed:
    """An exception that a background thread passes to the loop."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class PerDeviceQueue:
    """The queues of batches for one device: those read, and those uploaded.

    ``loader_prefetch_size`` and ``device_prefetch_size`` are their capacities.
    """

    def __init__(
        self, device: torch.device, loader_prefetch_size: int, device_prefetch_size: int
    ) -> None:
        self.device = device
        self.loader_queue = Channel(loader_prefetch_size)
        self.queue = Channel(device_prefetch_size)
        self.uploaders = UserCounts()

    @property
    def closed(self) -> bool:
        """Whether the queues are closed: no loop takes batches from them."""
        return self.queue.closed

    def close(self) -> None:
        """Drop the batches in the queues, and wake up the threads that wait for them."""
        self.loader_queue.close()
        self.queue.close()


def _read(loader: Iterable[Tree], queues: Sequence[PerDeviceQueue]) -> None:
    """The reader thread: hands out batches in rounds of one for each device; an incomplete round is dropped."""
    try:
        batches: list[object] = []
        for batch in loader:
            batches.append(batch)
            if len(batches) < len(queues):
                continue
            # the queue of a device whose loop has ended refuses its batch, and the other loops continue
            accepted = [q.loader_queue.put(item) for q, item in zip(queues, batches, strict=True)]
            if not any(accepted):
                return
            batches = []
    except BaseException as error:  # the loops raise it, with this traceback
        for queue in queues:
            queue.loader_queue.put(_Failed(error))
    finally:
        for queue in queues:
            queue.loader_queue.end()


def _upload(queue: PerDeviceQueue, send: Callable[[object, torch.device], object]) -> None:
    """An upload thread: calls ``send`` for one batch after the other.

    Several such threads keep the batches' order.
    """
    while True:
        number, item = queue.loader_queue.take()
        if item is CLOSED:
            break
        if not isinstance(item, _Failed):
            try:
                item = send(item, queue.device)
            except BaseException as error:  # the loop raises it, with this traceback
                item = _Failed(error)
        if not queue.queue.put(item, number):
            break
    if queue.uploaders.leave("upload"):
        queue.queue.end()


class _Pipeline:
    """The threads and queues of one pass over a loader.

    It holds no reference to the loops that take its batches, so that a loop that is dropped is collected and ends
    it.
    """

    def __init__(
        self,
        loader: Iterable[Tree],
        queues: Sequence[PerDeviceQueue],
        send: Callable[[Tree, torch.device], Tree],
        threads: int,
    ) -> None:
        self.loader = loader
        self.queues = {queue.device: queue for queue in queues}
        self.closed = False
        self.loops = UserCounts()
        self.threads = [
            threading.Thread(target=_read, args=(loader, queues), name="xla-loader", daemon=True)
        ]
        for queue in queues:
            for _ in range(threads):
                queue.uploaders.enter("upload")
                self.threads.append(
                    threading.Thread(
                        target=_upload, args=(queue, send), name="xla-upload", daemon=True
                    )
                )
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """End the threads, and wait for each up to ten seconds: a data set may block."""
        self.closed = True
        for queue in self.queues.values():
            queue.close()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)

    def left(self, device: torch.device) -> None:
        """Note that a loop over the device's batches has ended; after the last one, drop the other batches."""
        if self.loops.leave(str(device)):
            self.queues[device].close()
            if all(queue.closed for queue in self.queues.values()):
                self.close()

    def loader_gone(self) -> None:
        """Note that the ``ParallelLoader`` is gone, so that no further loop can start.

        Close devices without one.
        """
        for device in self.queues:
            self.loops.enter(str(device))
        for device in self.queues:
            self.left(device)


class _Stepping:
    """An iterator over the batches that ``take()`` returns, until it returns None; then it calls ``end()``.

    It ends the device's step before every ``batches_per_execution`` batches, and at the end.
    """

    def __init__(
        self,
        device: torch.device,
        batches_per_execution: int,
        take: Callable[[], Tree],
        end: Callable[[], object],
    ) -> None:
        self._device = device
        self._batches_per_execution = max(batches_per_execution, 1)
        self._batches_yielded = self._batches_per_execution - 1
        self._take = take
        self._end = end

    def __iter__(self) -> Iterator[Tree]:
        return self

    def __next__(self) -> Tree:
        return self.next()

    def next(self) -> Tree:
        """The next batch. Raises StopIteration at the end, and what reading or uploading the batch raised."""
        self._batches_yielded += 1
        if self._batches_yielded >= self._batches_per_execution:
            self._batches_yielded = 0
            self._mark_step()
        item = self._take()
        if item is None:
            self._mark_step()
            self.close()
            raise StopIteration
        return item

    def close(self) -> None:
        """End the iteration: its other batches are not read."""
        self._end()

    def _mark_step(self) -> None:
        with runtime.current_device(self._device.index or 0):
            training.sync()


class PerDeviceLoader(_Stepping):
    """An iterator over the batches of one device.

    It ends the device's step before every ``batches_per_execution`` batches, and after the last one.
    """

    def __init__(
        self, pipeline: _Pipeline, device: torch.device, batches_per_execution: int
    ) -> None:
        pipeline.loops.enter(str(device))
        end = weakref.finalize(self, pipeline.left, device)
        take = functools.partial(next_item, pipeline, device)
        super().__init__(device, batches_per_execution, take, end)
        self._devices = len(pipeline.queues)
        self._loader = pipeline.loader

    def __len__(self) -> int:
        """The number of batches for the device. Raises TypeError if the loader has no length."""
        return len(self._loader) // self._devices  # type: ignore[arg-type]


def _in_loop(
    loader: Iterable[Tree],
    device: torch.device,
    batches_per_execution: int = 1,
    input_sharding: ForeignObject = None,
    **_of_threads: object,
) -> Iterator[object]:
    """An iterator over the loader's batches that reads and uploads each in the loop's own thread, when needed.

    Ignores the options of background threads.
    """
    batches = iter(loader)

    def take() -> Tree:
        for batch in batches:
            return tensors.send_cpu_data_to_device(batch, device, input_sharding)
        return None

    return _Stepping(device, batches_per_execution, take, lambda: None)


def _describes_current_batch(loader: object) -> bool:
    """Whether the loader has attributes that describe the current batch, as those of Hugging Face accelerate do.

    ``end_of_dataloader`` of such a loader decides when gradients are applied, and how many samples count in a
    metric; some of these loaders also run collectives for each batch. In a thread that reads ahead, the attributes
    would describe a later batch, and the order of the collectives would differ between replicas.
    """
    return hasattr(loader, "end_of_dataloader")


def next_item(pipeline: _Pipeline, device: torch.device) -> Tree:
    """The next uploaded batch of ``device``, or None at the end. Raises what a background thread raised."""
    item = pipeline.queues[device].queue.get()
    if item is CLOSED:
        return None
    if isinstance(item, _Failed):
        pipeline.close()
        raise item.error
    return item


class ParallelLoader:
    """Reads the batches of ``cpu_loader`` in one thread, and uploads them to ``devices`` in others.

    Batch i goes to ``devices[i % len(devices)]``. The last batches are dropped if there is not one for each device,
    so that all devices do the same work.

    Args:
        cpu_loader: an iterable of batches: CPU tensors in any containers.
        devices: the xla devices.
        batchdim: has no effect.
        batches_per_execution: batches per step (default: 1).
        loader_prefetch_size: batches that wait on the host, per device (default: 16).
        device_prefetch_size: batches that wait on the device (default: 8).
        host_to_device_transfer_threads: upload threads per device (default: 1).
        input_sharding: an object with ``can_apply`` and ``apply`` that shards uploaded tensors, or a dict of such
            objects by the batch's keys (default: None).
    """

    def __init__(
        self,
        cpu_loader: Iterable[Tree],
        devices: Sequence[torch.device | str],
        batchdim: int = 0,
        batches_per_execution: int = 1,
        loader_prefetch_size: int = 16,
        device_prefetch_size: int = 8,
        host_to_device_transfer_threads: int = 1,
        input_sharding: ForeignObject = None,
    ) -> None:
        self._cpu_loader = cpu_loader
        self._devices = [_device(d) for d in devices]
        self._batchdim = batchdim
        self._batches_per_execution = batches_per_execution
        queues = [
            PerDeviceQueue(d, loader_prefetch_size, device_prefetch_size) for d in self._devices
        ]

        def send(batch: Tree, device: torch.device) -> Tree:
            return tensors.send_cpu_data_to_device(batch, device, input_sharding)

        threads = max(host_to_device_transfer_threads, 1)
        self._pipeline = _Pipeline(cpu_loader, queues, send, threads)
        weakref.finalize(self, self._pipeline.loader_gone)

    def per_device_loader(self, device: torch.device | str) -> PerDeviceLoader:
        """An iterator over the batches of ``device``.

        Raises ValueError for a device that is not among ``devices``, RuntimeError if this loader is closed.
        """
        own_device = _device(device)
        if own_device not in self._pipeline.queues:
            known = ", ".join(str(d) for d in self._devices)
            raise ValueError(MSG_DEVICE.format(device=own_device, known=known))
        if self._pipeline.queues[own_device].closed:
            raise RuntimeError(MSG_CLOSED)
        return PerDeviceLoader(self._pipeline, own_device, self._batches_per_execution)

    def per_device_samples(self) -> int:
        """The number of batches for each device. Raises TypeError if the loader has no length."""
        return len(self._cpu_loader) // len(self._devices)  # type: ignore[arg-type]

    def next_item(self, device: torch.device | str) -> Tree:
        """The next batch on ``device``, or None at the end."""
        return next_item(self._pipeline, _device(device))

    @property
    def batches_per_execution(self) -> int:
        """The number of batches per step."""
        return self._batches_per_execution

    def close(self) -> None:
        """End the background threads, and drop the batches that wait."""
        self._pipeline.close()


def _device(device: torch.device | str) -> torch.device:
    return runtime.trace_of(device).device


class MpDeviceLoader:
    """Wraps ``loader``, so that a loop over it gets the batches on ``device``, read in background threads.

    It ends the step between batches. ``kwargs`` are those of ``ParallelLoader``. Attributes that this object does
    not have are the wrapped loader's. The threads end when the loop does. A loader that has ``end_of_dataloader``,
    like those of Hugging Face accelerate, is read in the loop's own thread, because its attributes describe the
    current batch.
    """

    def __init__(self, loader: ForeignObject, device: torch.device | str, **kwargs: Tree) -> None:
        self._loader = loader
        self._device = device
        self._parallel_loader_kwargs = kwargs

    def __iter__(self) -> Iterator[Tree]:
        if _describes_current_batch(self._loader):
            return _in_loop(self._loader, _device(self._device), **self._parallel_loader_kwargs)
        parallel = ParallelLoader(self._loader, [self._device], **self._parallel_loader_kwargs)
        return iter(parallel.per_device_loader(self._device))

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Attribute:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)
