"""The process's devices: starts the chosen plugin's client when the first device is asked for."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pluggy
import torch

from xla_core.compilation import build_program, disk_cache, staged_executable, warm_start
from xla_core.compilation.disk_cache import CacheKey
from xla_core.compilation.program_table import StepProgram
from xla_core.contract import events
from xla_core.contract.device_protocol import (
    ArraySpec,
    DeviceClient,
    Executable,
    Placement,
    Program,
)
from xla_core.execution import replica_programs, run_step, spmd_mode
from xla_core.lowering import program_failures
from xla_core.lowering.target import target_of
from xla_core.operators import lowering_registry
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.plugins import discovery
from xla_core.recording.program_layout import Layout
from xla_core.recording.storage import Storage
from xla_core.recording.trace import Entry, Trace
from xla_core.support import counters
from xla_core.torch_bridge import device_guard, downcast_dtypes
from xla_core.torch_bridge.dtypes import numpy_dtype

_LITTLE: Final = 64 << 20
"""Bytes that nobody asks a device about: it would take longer than most such programs run."""


class Backend:
    """One addressable device of the running client, as its trace uses it."""

    def __init__(self, client: DeviceClient, index: int) -> None:
        self.client = client
        self.index = index
        description = client.local_devices()[index]
        self.placement = Placement((description.id,))
        self.platform = description.platform  # the name that jax lowers for
        self.target = target_of(description)
        # ahead of time: buffers have no values
        self.shapes_only: bool = getattr(client, "shapes_only", False)
        self.replicas: tuple[int, ...] = ()
        self.formats = downcast_dtypes.chosen()
        self.numpy_dtype = downcast_dtypes.device_format(self.formats, client.numpy_dtype)
        self._last: list[weakref.ref[Any]] = []
        self.last_program: StepProgram | None = None
        self._has_limit = True

    def put(self, array: np.ndarray) -> Any:
        """Copy a host array to the device, in the dtype the device keeps."""
        return self._put(array, self.numpy_dtype(array.dtype))

    def put_numbers(self, array: np.ndarray) -> Any:
        """Copy lifted numbers to the device: the user's number formats are for tensors only."""
        return self._put(array, self.client.numpy_dtype(array.dtype))

    def _put(self, array: np.ndarray, wanted: np.dtype) -> Any:
        if wanted != array.dtype:
            array = array.astype(wanted)
        return self._transfer(array, self.placement)

    def _transfer(self, array: np.ndarray, placement: Placement) -> Any:
        started = time.perf_counter_ns()
        buffer = self.client.put(array, placement)
        elapsed = time.perf_counter_ns() - started
        counters.sample("TransferToDeviceTime", elapsed)
        counters.sample("OutboundData", array.nbytes, counters.render_bytes)
        events.emit("transfer_to_device", nbytes=array.nbytes, nanoseconds=elapsed, buffer=buffer)
        return buffer

    def get(self, buffer: Any) -> np.ndarray:
        """Wait for a buffer and copy it to the host."""
        started = ready = time.perf_counter_ns()
        if events.listening():  # the time until there is a value, apart from copying it
            self.client.wait([buffer])
            ready = time.perf_counter_ns()
        try:
            array = self.client.get(buffer)
        except RuntimeError as error:
            raise self._explained(error) from error
        elapsed = time.perf_counter_ns() - started
        counters.sample("TransferFromDeviceTime", elapsed)
        counters.sample("InboundData", array.nbytes, counters.render_bytes)
        events.emit(
            "transfer_from_device",
            nbytes=array.nbytes,
            nanoseconds=elapsed,
            waited=ready - started,
        )
        return array

    def _explained(self, error: Exception) -> Exception:
        """What a program that runs out of memory while it runs raises where its values are wanted."""
        program = self.last_program
        if program is None:
            return error
        return program_failures.explained(error, program.name, program.largest)

    def input_layouts(self, trace: Trace) -> Hashable:
        """How the step's inputs are laid out: part of its program's identity. Called for every step."""
        return None

    def argument_layouts(self, storages: Iterable[Storage]) -> Hashable:
        """How tensors are laid out that a recorded graph is called with: part of what it is for."""
        return None

    def ready(self, storage: Storage) -> Any:
        """The buffer of a tensor that has a value, as programs take it."""
        return storage.buffer

    def adopted(self, storage: Storage, buffer: Any) -> Any:
        """The buffer for a tensor that just takes over another one's value (``copy_``)."""
        return buffer

    def layout(
        self,
        trace: Trace,
        entries: Sequence[Entry],
        outputs: Sequence[int],
        aliases: tuple[tuple[int, int], ...],
    ) -> Layout:
        """The layout of a program that is about to be made of ``entries``."""
        return replica_programs.layout_of(self, entries, outputs, aliases)

    def compile(self, program: Program) -> Executable:
        """Compile a program, after the extensions that partition programs had their say."""
        partitioned = extensions().hook.xla_core_partition_program(program=program)
        return self.client.compile(partitioned or program)

    def over_replicas(self, executable: Executable, name: str, collectives: Any) -> Executable:
        """What runs ``executable``, which is over all replicas, on this replica's buffers.

        Raises RuntimeError when no extension knows how.
        """
        found = extensions().hook.xla_core_replicated_executable(
            executable=executable, name=name, collectives=collectives, backend=self
        )
        if found is None:
            raise RuntimeError(f"{name} talks to other replicas: pip install xla-dist")
        return found

    def allocate(self, meta: TensorMeta) -> Any:
        """A buffer of zeros for a tensor of this shape and dtype."""
        spec = ArraySpec(meta.shape, self.numpy_dtype(numpy_dtype(meta.dtype)))
        return self.client.allocate(spec, self.placement)

    def copy(self, buffer: Any) -> Any:
        """A second buffer with the same value on this device."""
        return self.client.copy(buffer, self.placement)

    def copy_from(self, buffer: Any, _origin: Backend) -> Any:
        """The value of another device's buffer, on this device."""
        return self.client.copy(buffer, self.placement)

    def has_room(self, nbytes: int) -> bool:
        """Whether the device has so much memory left, as far as it tells; little is always there."""
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

    def launched(self, results: Sequence[Any]) -> None:
        """Remember what the last program will produce, for ``wait``; keeps no buffer alive."""
        self._last = [weakref.ref(r) for r in results]

    def wait(self) -> None:
        """Block until the last program has finished."""
        alive = [b for b in (ref() for ref in self._last) if b is not None]
        if alive:
            started = time.perf_counter_ns()
            try:
                self.client.wait(alive)
            except RuntimeError as error:
                raise self._explained(error) from error
            events.emit("waited", nanoseconds=time.perf_counter_ns() - started)

    def cache_key(self, text: bytes, name: str, placement: Placement) -> CacheKey | None:
        """The persistent cache's key of a step, or None when no cache is in use."""
        if disk_cache.current() is None:
            return None
        entries = (
            ("program", text),
            *environment(self.client),
            ("placement", repr(placement).encode()),
        )
        return CacheKey(entries, name)

    def load(self, key: CacheKey | None, name: str, placement: Placement) -> Any:
        """The executable stored under ``key``, or None."""
        stored = disk_cache.current()
        if stored is None or key is None:
            return None
        warm_start.note(key, placement)
        found = warm_start.take(key)
        payload = stored.get(key) if found is None else None
        if payload is None:
            return found
        try:
            return staged_executable.deserialize(self.client, payload, name, placement)
        except (ValueError, RuntimeError) as error:
            disk_cache.warn_unusable(key, error)
            return None

    def store(self, key: CacheKey | None, executable: Any) -> None:
        """Store an executable under ``key``, if a cache is in use and the plugin can serialize."""
        stored = disk_cache.current()
        if stored is None or key is None or stored.readonly:
            return
        with contextlib.suppress(NotImplementedError):
            stored.put(key, executable.serialize())


def environment(client: DeviceClient) -> tuple[tuple[str, bytes], ...]:
    """The entries of the persistent cache's keys that are the same for all of a process's programs."""
    manager = extensions()
    entries = [("lowering", build_program.lowering_version())]
    entries += build_program.rules_outside(_shaping_modules(client, manager))
    entries += [(f"device:{k}", v.encode()) for k, v in sorted(client.fingerprint().items())]
    for found in manager.hook.xla_core_cache_key_entries():
        entries += [(f"extension:{k}", v) for k, v in sorted(found.items())]
    return tuple(entries)


# Who implements one of them decides what is in a program.
_SHAPING: Final = frozenset({
    "xla_core_make_backends", "xla_core_register_operators", "xla_core_partition_program",
    "xla_core_over_parts", "xla_core_replicated_executable",
})  # fmt: skip


def _shaping_modules(client: DeviceClient, manager: pluggy.PluginManager) -> frozenset[str]:
    """The modules, by name, of the device's plugin and of the extensions that take part in lowering."""
    names = {type(client).__module__}
    for extension in manager.get_plugins():
        callers = manager.get_hookcallers(extension) or ()
        if any(caller.name in _SHAPING for caller in callers):
            names.add(getattr(extension, "__name__", type(extension).__module__))
    return frozenset(names)


class _Runtime:
    client: DeviceClient | None = None
    device_type: str | None = None
    options: dict[str, str] = {}
    manager: pluggy.PluginManager | None = None
    traces: list[Trace] = []


_lock = threading.RLock()


def client() -> DeviceClient:
    """The running client; started on the first call. Raises RuntimeError when no device can be had."""
    found = _Runtime.client
    return found if found is not None else _start()


def extensions() -> pluggy.PluginManager:
    """The plugin manager with the installed extensions, whose operators are registered then."""
    with _lock:
        if _Runtime.manager is None:
            manager = discovery.load_extensions()
            manager.hook.xla_core_register_operators(registry=lowering_registry)
            manager.hook.xla_core_subscribe(events=events)
            _Runtime.manager = manager
        return _Runtime.manager


def device_type() -> str:
    """The chosen device, upper-case (``CPU``, ``TPU``); decided once, at the first call."""
    with _lock:
        if _Runtime.device_type is None:
            _Runtime.device_type = discovery.chosen_device()
        return _Runtime.device_type


def set_device_type(pjrt_device: str) -> None:
    """Choose the device before the client starts. Raises RuntimeError when another one runs."""
    with _lock:
        name = pjrt_device.upper()
        if _Runtime.client is not None and name != _Runtime.device_type:
            raise RuntimeError(
                f"the {_Runtime.device_type} client runs already; choose {name} before the first "
                "xla tensor is made, or set PJRT_DEVICE"
            )
        _Runtime.device_type = name


def set_options(options: Mapping[str, str]) -> None:
    """Options for the plugin besides the environment. Raises RuntimeError when the client runs."""
    with _lock:
        if _Runtime.client is not None:
            raise RuntimeError(
                f"the {_Runtime.device_type} client runs already; say {', '.join(options)} before "
                "the first xla tensor is made"
            )
        _Runtime.options |= options


def started() -> bool:
    """Whether the client runs already."""
    return _Runtime.client is not None


def _start() -> DeviceClient:
    with _lock:
        if _Runtime.client is None:
            options = {**os.environ, **_Runtime.options}
            new = discovery.start_client(device_type(), extensions(), options)
            _attach(_backends(new))
            _Runtime.client = new
            warm_start.start(new, functools.partial(environment, new))
        return _Runtime.client


def _backends(client: DeviceClient) -> Sequence[Backend]:
    """One per device that PyTorch shall see."""
    found = extensions().hook.xla_core_make_backends(client=client)
    if found is not None:
        return found
    backends = [Backend(client, index) for index in range(len(client.local_devices()))]
    for backend in backends:
        backend.replicas = _one_per_process(client)
    return backends


def _attach(backends: Sequence[Backend]) -> None:
    """Let ``backends`` be ``xla:0``, ``xla:1``, ...; a device that exists keeps its tensors."""
    traces = _Runtime.traces[: len(backends)]
    for index, backend in enumerate(backends):
        if index == len(traces):
            traces.append(Trace(torch.device("xla", index), run_step.flush))
        traces[index].backend = backend
    device_guard.set_device_count(len(traces))
    _Runtime.traces = traces


def initialize_cache(path: str | os.PathLike[str], readonly: bool = False) -> None:
    """Use the persistent cache in ``path`` from now on; what this script used last is loaded.

    Raises CacheRefusedError for a directory that other users can write to.
    """
    disk_cache.initialize(path, readonly)
    with _lock:
        found = _Runtime.client
        if found is not None:
            warm_start.start(found, functools.partial(environment, found))


def reattach() -> None:
    """Ask the extensions again which devices there are; what is pending runs first.

    For an extension whose answer to ``xla_core_make_backends`` has changed while the client runs.
    Programs made so far are forgotten.
    """
    with _lock:
        if _Runtime.client is None:
            return
        for trace in _Runtime.traces:
            trace.flush(trace)
            trace.forget()
        _attach(_backends(_Runtime.client))


def process_replicas() -> tuple[int, ...]:
    """The ids of the job's replicas, one per process, in ordinal order.

    Empty when this process is alone, and in SPMD mode, which has no replicas.
    """
    return () if spmd_mode.is_spmd() else _one_per_process(client())


def _one_per_process(client: DeviceClient) -> tuple[int, ...]:
    """One replica per process, on its first device, in the order of processes; alone, none."""
    first: dict[int, int] = {}
    for description in sorted(client.devices(), key=lambda d: d.id):
        first.setdefault(description.process_index, description.id)
    return tuple(first[process] for process in sorted(first)) if len(first) > 1 else ()


def set_replicas(device_ids: Sequence[int]) -> None:
    """Let the devices with these ids be the replicas, in ordinal order; none: each is on its own.

    Programs that talk to other replicas run on all of them at once, from now on.
    """
    replicas = tuple(device_ids)
    processes = replicas == process_replicas()
    for trace in traces():
        # a further device of a process is no replica, and must not pass for one that is alone
        known = processes or trace.backend.placement.devices[0] in replicas
        trace.backend.replicas = replicas if known else ()


def traces() -> list[Trace]:
    """The trace of every addressable device, by index."""
    client()
    return _Runtime.traces


def trace_of(device: torch.device | str | None) -> Trace:
    """The trace of an ``xla`` device; without an index the calling thread's current one.

    Raises RuntimeError naming the devices there are when the index is not among them.
    """
    wanted = torch.device("xla" if device is None else device)
    if wanted.type != "xla":
        raise RuntimeError(f"expected an xla device, got {wanted}")
    known = _Runtime.traces or traces()
    index = wanted.index if wanted.index is not None else device_guard.current_index()
    if index >= len(known):
        names = ", ".join(str(t.device) for t in known)
        raise RuntimeError(f"there is no device xla:{index}; this process has {names}")
    return known[index]


def sync(device: torch.device | None = None, wait: bool = False) -> None:
    """Run what is pending on ``device`` (default: the current one); with ``wait`` until it is done."""
    trace = trace_of(device)
    trace.flush(trace)
    if wait:
        trace.backend.wait()


def wait(devices: Sequence[torch.device] = ()) -> None:
    """Block until the programs launched on ``devices`` (default: all) have finished."""
    for trace in [trace_of(d) for d in devices] or traces():
        trace.backend.wait()


@contextlib.contextmanager
def current_device(index: int) -> Iterator[None]:
    """Make ``xla:index`` the thread's current device inside a ``with`` block."""
    former = device_guard.current_index()
    device_guard.set_current_index(index)
    try:
        yield
    finally:
        device_guard.set_current_index(former)
