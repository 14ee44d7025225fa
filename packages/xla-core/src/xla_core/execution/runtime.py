"""The devices of the process: starts the chosen plugin's client when the first device is used."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from xla_core.compilation import disk_cache, program_identity, warm_start
from xla_core.contract.device_protocol import (
    DeviceClient,
    capabilities_of,
)
from xla_core.execution import deferred_steps, operator_counts, run_step, spmd_mode
from xla_core.execution.device_backend import DeviceBackend
from xla_core.lowering import compile_settings
from xla_core.operators.extensions import extensions
from xla_core.plugins import discovery
from xla_core.recording.storage import Backend
from xla_core.recording.trace import Trace
from xla_core.support import counters, flags
from xla_core.torch_bridge import device_guard


class _Runtime:
    client: DeviceClient | None = None
    device_type: str | None = None
    options: dict[str, str] = {}
    traces: list[Trace] = []
    stand_ins: dict[int, Trace] = {}


_lock = threading.RLock()


def client() -> DeviceClient:
    """The running client; the first call starts it. Raises RuntimeError when no device is available."""
    running = _Runtime.client
    return running if running is not None else _start()


def device_type() -> str:
    """The chosen device, upper-case (``CPU``, ``TPU``); decided once, at the first call."""
    with _lock:
        if _Runtime.device_type is None:
            _Runtime.device_type = discovery.chosen_device()
        return _Runtime.device_type


def set_device_type(pjrt_device: str) -> None:
    """Choose the device before the client starts. Raises RuntimeError if another client is running."""
    with _lock:
        name = pjrt_device.upper()
        if _Runtime.client is not None and name != _Runtime.device_type:
            raise RuntimeError(
                f"the {_Runtime.device_type} client is already running; choose {name} before the first "
                "xla tensor is made, or set PJRT_DEVICE"
            )
        _Runtime.device_type = name


def set_options(options: Mapping[str, str]) -> None:
    """Set options of the plugin, in addition to the environment. Raises RuntimeError if the client is running."""
    with _lock:
        if _Runtime.client is not None:
            raise RuntimeError(
                f"the {_Runtime.device_type} client is already running; set {', '.join(options)} before "
                "the first xla tensor is made"
            )
        _Runtime.options |= options


_followers: list[Callable[[DeviceClient], None]] = []


def when_started(follow: Callable[[DeviceClient], None]) -> None:
    """Call ``follow(client)`` when the client has started."""
    _followers.append(follow)


def started() -> bool:
    """Whether the client is running."""
    return _Runtime.client is not None


def _start() -> DeviceClient:
    with _lock:
        if _Runtime.client is None:
            options = {**os.environ, **_Runtime.options}
            new = discovery.start_client(device_type(), extensions(), options)
            _attach(_backends(new))
            _Runtime.client = new
            compile_settings.follow_torch(capabilities_of(new).tf32)
            counters.before_looking(_count_pending)
            for follow in _followers:
                follow(new)
            _keep_tuning(new)
            warm_start.start(new, functools.partial(program_identity.environment, new))
        return _Runtime.client


def _keep_tuning(running: DeviceClient) -> None:
    """If there is a persistent cache, tell the device to keep its compiler's measurements there."""
    keep, cache = capabilities_of(running).keep_tuning, disk_cache.current()
    if keep is not None and cache is not None:
        keep(cache.path, cache.readonly)


def _count_pending() -> None:
    for trace in _Runtime.traces:
        trace.backend.queue.wait(
            own=True
        )  # so that the counts of the reader's own steps are complete
    operator_counts.count_pending(_Runtime.traces)


def _backends(client: DeviceClient) -> Sequence[Backend]:
    """One backend per device that PyTorch sees."""
    of_extension = extensions().hook.xla_core_make_backends(client=client)
    if of_extension is not None:
        return of_extension
    backends = [DeviceBackend(client, index) for index in range(len(client.local_devices()))]
    for backend in backends:
        backend.replicas = _one_per_process(client)
    return backends


def _attach(backends: Sequence[Backend]) -> None:
    """Make ``backends`` the devices ``xla:0``, ``xla:1``, ...; a device that already exists keeps its tensors."""
    traces = _Runtime.traces[: len(backends)]
    for index, backend in enumerate(backends):
        if index == len(traces):
            traces.append(Trace(torch.device("xla", index), run_step.flush, backend))
        else:
            traces[index].attach(backend)
    device_guard.set_device_count(len(traces))
    _Runtime.traces = traces


def initialize_cache(path: str | os.PathLike[str], readonly: bool = False) -> None:
    """Use the persistent cache in ``path`` from now on, and load the programs of this script's last run.

    Raises CacheRefusedError for a directory that other users can write to.
    """
    disk_cache.initialize(path, readonly)
    with _lock:
        running = _Runtime.client
        if running is not None:
            _keep_tuning(running)
            warm_start.start(running, functools.partial(program_identity.environment, running))


def reattach() -> None:
    """Ask the extensions again for the devices; pending steps run first.

    For an extension whose answer to ``xla_core_make_backends`` has changed while the client is running.
    Existing programs are dropped.
    """
    with _lock:
        if _Runtime.client is None:
            return
        for trace in _Runtime.traces:
            with trace.lock:
                trace.turns.run_all()
                deferred_steps.finish(trace)
                trace.forget()
        _attach(_backends(_Runtime.client))


def process_replicas() -> tuple[int, ...]:
    """The ids of the job's replicas, one per process, in ordinal order.

    Empty if this process is alone, and in SPMD mode, which has no replicas.
    """
    return () if spmd_mode.is_spmd() else _one_per_process(client())


def _one_per_process(client: DeviceClient) -> tuple[int, ...]:
    """One replica per process, on its first device, in the order of processes; empty if there is one process."""
    first: dict[int, int] = {}
    for description in sorted(client.devices(), key=lambda d: d.id):
        first.setdefault(description.process_index, description.id)
    return tuple(first[process] for process in sorted(first)) if len(first) > 1 else ()


def set_replicas(device_ids: Sequence[int]) -> None:
    """Make the devices with these ids the replicas, in ordinal order; with no ids, there are no replicas.

    From now on, programs that communicate with other replicas run on all of them at once.
    """
    replicas = tuple(device_ids)
    settle()
    processes = replicas == process_replicas()
    for trace in traces():
        # a second device of a process is not a replica, but must not count as a single device either
        known = processes or trace.backend.placement.devices[0] in replicas
        trace.backend.replicas = replicas if known else ()


def traces() -> list[Trace]:
    """The trace of every addressable device, by index."""
    client()
    return _Runtime.traces


def trace_of(device: torch.device | str | None) -> Trace:
    """The trace of an ``xla`` device; without an index, of the calling thread's current device.

    Raises RuntimeError, which names the existing devices, if there is no such device.
    """
    wanted = torch.device("xla" if device is None else device)
    if wanted.type != "xla":
        raise RuntimeError(f"expected an xla device, got {wanted}")
    known = _Runtime.traces or traces()
    index = wanted.index if wanted.index is not None else device_guard.current_index()
    if index >= len(known):
        names = ", ".join(str(t.device) for t in known)
        raise RuntimeError(f"there is no device xla:{index}; this process has {names}")
    if _Runtime.stand_ins:
        other = _Runtime.stand_ins.get(threading.get_ident())
        if other is not None and other.device == known[index].device:
            return other
    return known[index]


@contextlib.contextmanager
def standing_in(trace: Trace) -> Iterator[None]:
    """A block in which the calling thread finds ``trace`` in place of its device's own, as for new tensors."""
    thread = threading.get_ident()
    _Runtime.stand_ins[thread] = trace
    try:
        yield
    finally:
        del _Runtime.stand_ins[thread]


def sync(device: torch.device | None = None, wait: bool = False) -> None:
    """Run what is pending on ``device`` (default: the current one); with ``wait``, wait until it is done.

    This includes what the calling thread and threads that have ended have recorded.
    """
    trace = trace_of(device)
    with trace.lock:
        trace.flush(trace, ending=True)
        trace.turns.run_ended()
    if wait:
        trace.backend.wait()


def settle() -> None:
    """Wait until all deferred runs have started; their errors are raised by the next sync or read."""
    for trace in _Runtime.traces:
        deferred_steps.settle(trace)


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


def use_topology(name: str, *, reads: str = "error", device_type: str = "TPU") -> None:
    """Make the ``xla`` devices those of the topology ``name`` (``v5e:4x4``), without any chip.

    Steps are traced, lowered and compiled as for the chips, but tensors have only shapes. ``reads`` (default:
    ``"error"``) says what reading a value does: ``"error"`` raises an error, ``"zeros"`` returns zeros. Call it
    before the first ``xla`` tensor is made. The plugin of ``device_type`` (default: ``"TPU"``) defines the
    topologies. Raises RuntimeError if a client is already running.
    """
    set_options({flags.AOT_TOPOLOGY.name: name, flags.AOT_READS.name: reads})
    set_device_type(device_type)


def is_ahead_of_time() -> bool:
    """Whether the running client compiles for a topology without computing anything."""
    return started() and capabilities_of(client()).shapes_only
