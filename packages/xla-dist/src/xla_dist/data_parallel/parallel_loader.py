"""Loaders that read and upload batches in the background while the device computes."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch

from xla_core.extension_api import runtime, tensors, training
from xla_core.extension_api.operators import Tree
from xla_dist.data_parallel.channels import CLOSED, Channel, Turns

_JOIN_SECONDS: Final = 10.0

MSG_CLOSED: Final = "this ParallelLoader is closed (its loops have ended); make a new one"
MSG_DEVICE: Final = "this ParallelLoader has no queue for {device}; it has {known}"


class _Failed:
    """An exception on its way from a background thread to the loop."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class PerDeviceQueue:
    """Batches on their way to one device: on the host, and uploaded."""

    def __init__(
        self, device: torch.device, loader_prefetch_size: int, device_prefetch_size: int
    ) -> None:
        self.device = device
        self.loader_queue = Channel(loader_prefetch_size)
        self.queue = Channel(device_prefetch_size)
        self.uploaders = Turns()

    @property
    def closed(self) -> bool:
        """Whether no loop takes batches from here any more."""
        return self.queue.closed

    def close(self) -> None:
        """Drop what is under way and wake up the threads."""
        self.loader_queue.close()
        self.queue.close()


def _read(loader: Iterable[Any], queues: Sequence[PerDeviceQueue]) -> None:
    """The reader thread: a batch for every device at a time; a last incomplete round is dropped."""
    try:
        round_: list[object] = []
        for batch in loader:
            round_.append(batch)
            if len(round_) < len(queues):
                continue
            # a device whose loop has ended drops what is meant for it; the others go on
            wanted = [q.loader_queue.put(item) for q, item in zip(queues, round_, strict=True)]
            if not any(wanted):
                return
            round_ = []
    except BaseException as error:  # raised in the loops, with this traceback
        for queue in queues:
            queue.loader_queue.put(_Failed(error))
    finally:
        for queue in queues:
            queue.loader_queue.end()


def _upload(queue: PerDeviceQueue, send: Callable[[object, torch.device], object]) -> None:
    """An upload thread: batches keep their order, however many threads there are."""
    while True:
        number, item = queue.loader_queue.take()
        if item is CLOSED:
            break
        if not isinstance(item, _Failed):
            try:
                item = send(item, queue.device)
            except BaseException as error:  # as above
                item = _Failed(error)
        if not queue.queue.put(item, number):
            break
    if queue.uploaders.leave("upload"):
        queue.queue.end()


class _Pipeline:
    """The threads and queues of one pass over a loader; knows nothing of who reads it."""

    def __init__(
        self,
        loader: Iterable[Any],
        queues: Sequence[PerDeviceQueue],
        send: Callable[[Any, torch.device], Any],
        threads: int,
    ) -> None:
        self.loader = loader
        self.queues = {queue.device: queue for queue in queues}
        self.closed = False
        self.loops = Turns()
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
        """End the threads; returns when they have (or after ten seconds: a data set may block)."""
        self.closed = True
        for queue in self.queues.values():
            queue.close()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)

    def left(self, device: torch.device) -> None:
        """A loop over a device's batches has ended: the rest of them is not read."""
        if self.loops.leave(str(device)):
            self.queues[device].close()
            if all(queue.closed for queue in self.queues.values()):
                self.close()

    def unowned(self) -> None:
        """No further loop can be started: devices without one will not get one."""
        for device in self.queues:
            self.loops.enter(str(device))
        for device in self.queues:
            self.left(device)


class _Stepping:
    """An iterator over what ``take()`` gives, up to None; ``end()`` is called then.

    It ends the step before it hands out ``batches_per_execution`` batches, and at the end.
    """

    def __init__(
        self,
        device: torch.device,
        batches_per_execution: int,
        take: Callable[[], Any],
        end: Callable[[], Any],
    ) -> None:
        self._device = device
        self._batches_per_execution = max(batches_per_execution, 1)
        self._batches_yielded = self._batches_per_execution - 1
        self._take = take
        self._end = end

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Tree:
        return self.next()

    def next(self) -> Tree:
        """The next batch; raises what reading or uploading it raised, StopIteration at the end."""
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
        """Read no more."""
        self._end()

    def _mark_step(self) -> None:
        with runtime.current_device(self._device.index or 0):
            training.sync()


class PerDeviceLoader(_Stepping):
    """The batches of one device, as an iterator. It ends the step before it hands out a batch.

    With ``batches_per_execution`` above one before every so many. Also when there are no more.
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
        """How many batches the device gets, where the loader has a length."""
        return len(self._loader) // self._devices  # type: ignore[arg-type]


def _in_loop(
    loader: Iterable[Any],
    device: torch.device,
    batches_per_execution: int = 1,
    input_sharding: Any = None,
    **_of_threads: Any,
) -> Iterator[object]:
    """A loader's batches read and uploaded in the loop's own thread, each when the loop asks for it."""
    batches = iter(loader)

    def take() -> Tree:
        for batch in batches:
            return tensors.send_cpu_data_to_device(batch, device, input_sharding)
        return None

    return _Stepping(device, batches_per_execution, take, lambda: None)


def _speaks_of_its_loop(loader: object) -> bool:
    """Whether a loader says which batch its loop is at, as those of Hugging Face's accelerate do.

    Their ``end_of_dataloader`` decides when gradients are applied and how many samples count in a
    metric, and some make collectives for each batch: read ahead they would speak of other batches, and
    order their collectives by chance.
    """
    return hasattr(loader, "end_of_dataloader")


def next_item(pipeline: _Pipeline, device: torch.device) -> Tree:
    """The next uploaded batch, or None. Raises what a background thread raised."""
    item = pipeline.queues[device].queue.get()
    if item is CLOSED:
        return None
    if isinstance(item, _Failed):
        pipeline.close()
        raise item.error
    return item


class ParallelLoader:
    """Reads ``cpu_loader`` in one thread and uploads to ``devices`` in others.

    The i-th batch goes to ``devices[i % len(devices)]``; a last incomplete round is dropped, so that all
    devices do the same work. ``loader_prefetch_size`` batches wait on the host, ``device_prefetch_size``
    on each device; ``host_to_device_transfer_threads`` per device upload. ``input_sharding`` (an object
    with ``can_apply`` and ``apply``, or a dict of them by batch key) lays out what was uploaded.
    ``batches_per_execution`` batches make one step. ``batchdim`` is accepted for torch_xla's sake.
    """

    def __init__(
        self,
        cpu_loader: Iterable[Any],
        devices: Sequence[torch.device | str],
        batchdim: int = 0,
        batches_per_execution: int = 1,
        loader_prefetch_size: int = 16,
        device_prefetch_size: int = 8,
        host_to_device_transfer_threads: int = 1,
        input_sharding: Any = None,
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
        weakref.finalize(self, self._pipeline.unowned)

    def per_device_loader(self, device: torch.device | str) -> PerDeviceLoader:
        """The iterator over one device's batches. Raises RuntimeError when the loader is closed."""
        wanted = _device(device)
        if wanted not in self._pipeline.queues:
            known = ", ".join(str(d) for d in self._devices)
            raise ValueError(MSG_DEVICE.format(device=wanted, known=known))
        if self._pipeline.queues[wanted].closed:
            raise RuntimeError(MSG_CLOSED)
        return PerDeviceLoader(self._pipeline, wanted, self._batches_per_execution)

    def per_device_samples(self) -> int:
        """How many batches each device gets, where the loader has a length."""
        return len(self._cpu_loader) // len(self._devices)  # type: ignore[arg-type]

    def next_item(self, device: torch.device | str) -> Tree:
        """The next batch on ``device``, or None at the end."""
        return next_item(self._pipeline, _device(device))

    @property
    def batches_per_execution(self) -> int:
        """How many batches make one step."""
        return self._batches_per_execution

    def close(self) -> None:
        """End the background threads; batches under way are dropped."""
        self._pipeline.close()


def _device(device: torch.device | str) -> torch.device:
    return runtime.trace_of(device).device


class MpDeviceLoader:
    """Wraps a loader so that iterating over it gives batches on ``device``, read in the background.

    It ends the step between batches. ``kwargs`` are those of ``ParallelLoader``. Attributes that it
    lacks are the wrapped loader's. Leaving a loop early ends its threads. A loader that has
    ``end_of_dataloader``, as those of Hugging Face's accelerate, is read in the loop's own thread: what
    it says of the loop has to be true while the loop works on a batch.
    """

    def __init__(self, loader: Any, device: torch.device | str, **kwargs: Tree) -> None:
        self._loader = loader
        self._device = device
        self._parallel_loader_kwargs = kwargs

    def __iter__(self) -> Iterator[Any]:
        if _speaks_of_its_loop(self._loader):
            return _in_loop(self._loader, _device(self._device), **self._parallel_loader_kwargs)
        parallel = ParallelLoader(self._loader, [self._device], **self._parallel_loader_kwargs)
        return iter(parallel.per_device_loader(self._device))

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)
