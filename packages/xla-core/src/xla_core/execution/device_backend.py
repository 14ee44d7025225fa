"""``DeviceBackend``: the backend of one addressable device of the running client."""

from __future__ import annotations

import time
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

import numpy as np

from xla_core.compilation.program_table import StepProgram
from xla_core.contract import events
from xla_core.contract.device_protocol import (
    ArraySpec,
    Buffer,
    DeviceClient,
    Placement,
    capabilities_of,
)
from xla_core.execution import replica_programs
from xla_core.launching.launch_queue import LaunchQueue, value_of
from xla_core.lowering import program_failures
from xla_core.operators.target import target_of
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Entry
from xla_core.recording.program_layout import Layout
from xla_core.recording.storage import Backend, Recorder, Storage
from xla_core.support import counters, flight_ring
from xla_core.torch_bridge import downcast_dtypes
from xla_core.torch_bridge.dtypes import numpy_dtype
from xla_core.varying.padded_buffer import PaddedBuffer, exact_buffer, whole_buffer

_LITTLE: Final = 64 << 20
"""For fewer bytes the device is not asked for free memory: that takes longer than most such programs run."""

_MOST_KEPT: Final = 128
_LARGEST_KEPT: Final = 4096
"""How many vectors of lifted numbers are kept on a device, and the largest size of one in bytes."""


class _NumbersCache:
    enabled = False


def keep_numbers(enabled: bool) -> None:
    """Set whether lifted numbers stay on the device for later steps with the same numbers (initially not)."""
    _NumbersCache.enabled = bool(enabled)


def keeps_numbers() -> bool:
    """Whether lifted numbers stay on the device, see ``keep_numbers``."""
    return _NumbersCache.enabled


class DeviceBackend(Backend):
    """The backend of one addressable device of the running client."""

    runs_counter = "ExecuteComputation"
    runs_metric = "ExecuteTime"
    virtual_name: str | None = None

    def __init__(self, client: DeviceClient, index: int) -> None:
        self.client = client
        self.index = index
        description = client.local_devices()[index]
        self.placement = Placement((description.id,))
        self.platform = description.platform  # the name that jax lowers for
        self.target = target_of(description)
        # ahead of time: buffers have no values
        self.shapes_only: bool = capabilities_of(client).shapes_only
        self.replicas: tuple[int, ...] = ()
        self.formats = downcast_dtypes.chosen()
        self.numpy_dtype = downcast_dtypes.device_format(self.formats, client.numpy_dtype)
        self._last: list[weakref.ref[Buffer]] = []
        self.last_program: StepProgram | None = None
        self._has_limit = True
        self.queue = LaunchQueue()
        # over a mesh, values move when they are used, and processes must not wait for each other's compilers
        self.may_defer: bool = (
            type(self) is DeviceBackend and capabilities_of(client).compiles_beside
        )
        self._numbers: dict[tuple[str, bytes], Buffer] = {}

    def put(self, array: np.ndarray) -> Buffer:
        """Copy a host array to the device, in the dtype in which the device keeps it."""
        return self._put(array, self.numpy_dtype(array.dtype))

    def put_numbers(self, array: np.ndarray) -> Buffer:
        """Copy lifted numbers to the device, or return a kept buffer with the same numbers.

        Buffers are kept after ``keep_numbers(True)``. The user's number formats
        apply to tensors only; programs never reuse the memory of numbers.
        """
        wanted = self.client.numpy_dtype(array.dtype)
        if not _NumbersCache.enabled:
            self._numbers.clear()
        if not _NumbersCache.enabled or array.nbytes > _LARGEST_KEPT:
            counters.increment("DeviceDataCacheMiss")
            return self._put(array, wanted)
        key = (array.dtype.char, array.tobytes())
        buffer = self._numbers.pop(key, None)
        if buffer is None:
            counters.increment("DeviceDataCacheMiss")
            buffer = self._put(array, wanted)
            if len(self._numbers) >= _MOST_KEPT:
                self._numbers.pop(next(iter(self._numbers)), None)
        self._numbers[key] = buffer  # dict order is the order of use
        return buffer

    def _put(self, array: np.ndarray, wanted: np.dtype) -> Buffer:
        if wanted != array.dtype:
            array = array.astype(wanted)
        return self.transfer(array, self.placement)

    def transfer(self, array: np.ndarray, placement: Placement) -> Buffer:
        """Copy an array to the devices of ``placement``; counts the transfer and emits its event."""
        what = (array.dtype, array.shape)
        record = flight_ring.begin(flight_ring.SEND, what, array.nbytes)
        buffer = self.client.put(array, placement)
        elapsed = flight_ring.end(record)
        counters.sample("TransferToDeviceTime", elapsed)
        counters.sample("OutboundData", array.nbytes, counters.render_bytes)
        if events.listening(events.TransferToDevice):
            sent = events.TransferToDevice(
                buffer=buffer, array=array, nbytes=array.nbytes, nanoseconds=elapsed
            )
            events.emit(sent)
        return buffer

    def get(self, buffer: Buffer) -> np.ndarray:
        """Wait for a buffer and copy it to the host, in the dtype in which the device keeps it.

        Raises RuntimeError or torch.OutOfMemoryError if the program that computes it failed.
        """
        record = flight_ring.begin(flight_ring.FETCH, None)
        held = value_of(buffer)
        started = ready = time.perf_counter_ns()
        if events.listening(events.TransferFromDevice):
            # measures the time until the value exists separately from the time to copy it
            self.client.wait([whole_buffer(held)])
            ready = time.perf_counter_ns()
        try:
            array = self.client.get(whole_buffer(held))
        except RuntimeError as error:
            flight_ring.waited(record)
            raise self._explained(error) from error
        elapsed = flight_ring.waited(record)
        if type(held) is PaddedBuffer:
            array = held.cut(array)
        flight_ring.describe(record, (array.dtype, array.shape), array.nbytes)
        counters.sample("TransferFromDeviceTime", elapsed)
        counters.sample("InboundData", array.nbytes, counters.render_bytes)
        if events.listening(events.TransferFromDevice):
            received = events.TransferFromDevice(
                nbytes=array.nbytes, nanoseconds=elapsed, waited=ready - started
            )
            events.emit(received)
        return array

    def _explained(self, error: Exception) -> Exception:
        """The error to raise for ``error``, which names the program if it ran out of memory while running."""
        program = self.last_program
        if program is None:
            return error
        return program_failures.explained(error, program.name, program.largest)

    def input_layouts(self, trace: Recorder) -> Hashable:
        """The layouts of the step's inputs: always the same on one device. Called for every step."""
        return None

    def argument_layouts(self, storages: Iterable[Storage]) -> Hashable:
        """The layouts of the tensors that a recorded graph is called with: always the same on one device."""
        return None

    def sharding_text(self, storage: Storage) -> str | None:
        """None: a tensor on one device is not split."""
        return None

    def shard_count(self) -> int:
        """1: a tensor on one device is not split."""
        return 1

    def device_buffer(self, storage: Storage) -> Buffer:
        """The buffer of a tensor that has a value, as programs take it."""
        return exact_buffer(value_of(storage.buffer))

    def buffer_for_copy(self, storage: Storage, buffer: Buffer) -> Buffer:
        """The buffer to bind when ``copy_`` makes a tensor share another one's value: the same buffer."""
        return buffer

    def layout(
        self,
        trace: Recorder,
        entries: Sequence[Entry],
        outputs: Sequence[int],
        aliases: tuple[tuple[int, int], ...],
    ) -> Layout:
        """The layout of a program of ``entries``: on the devices of all replicas, or on this device.

        ``outputs`` are the numbers of the wanted values, ``aliases`` the pairs of an input and the output that
        reuses its memory; ``trace`` is not used. See ``recording.storage.Backend``.
        """
        return replica_programs.layout_of(self, entries, outputs, aliases)

    def allocate(self, meta: TensorMeta) -> Buffer:
        """A buffer of zeros for a tensor of this shape and dtype."""
        spec = ArraySpec(meta.shape, self.numpy_dtype(numpy_dtype(meta.dtype)))
        return self.client.allocate(spec, self.placement)

    def copy(self, buffer: Buffer) -> Buffer:
        """A second buffer with the same value on this device."""
        held = value_of(buffer)
        if type(held) is PaddedBuffer:
            return held.copied()  # type: ignore[return-value]  # stands in place of a buffer
        return self.client.copy(held, self.placement)

    def copy_from(self, buffer: Buffer, origin: Backend) -> Buffer:
        """A buffer on this device with the value of another device's buffer."""
        return self.client.copy(exact_buffer(value_of(buffer)), self.placement)

    def has_room(self, nbytes: int) -> bool:
        """Whether the device reports that much free memory; always True for small sizes."""
        if nbytes < _LITTLE:
            return True
        if self._has_limit:
            info = self.client.memory_info(self.index)
            if info.bytes_limit is not None:
                return nbytes <= info.bytes_limit - info.bytes_used
            self._has_limit = False
        try:
            np.empty(nbytes, np.uint8)  # the host's own memory; nothing is written to it
        except (MemoryError, ValueError):
            return False
        return True

    def launched(self, results: Sequence[Buffer]) -> None:
        """Remember the results of the last program for ``wait``, without keeping a buffer alive."""
        self._last = list(map(weakref.ref, results))

    def wait(self) -> None:
        """Block until the last program has finished.

        Raises RuntimeError or torch.OutOfMemoryError if that program, or a deferred run, failed.
        """
        self.queue.finish()
        alive = [b for b in (ref() for ref in self._last) if b is not None]
        if alive:
            record = flight_ring.begin(flight_ring.WAIT, None)
            try:
                self.client.wait(list(map(whole_buffer, alive)))
            except RuntimeError as error:
                flight_ring.waited(record)
                raise self._explained(error) from error
            events.emit(events.Waited(nanoseconds=flight_ring.waited(record)))
