"""The single-device functions behind ``torch_xla`` and ``torch_xla.core.xla_model``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TextIO, TypeAlias, TypedDict

import torch

from xla_core.contract import events
from xla_core.execution import ordinals, runtime, step_closures
from xla_core.execution.ordinals import global_ordinal as global_ordinal
from xla_core.execution.ordinals import is_master_ordinal as is_master_ordinal
from xla_core.execution.ordinals import process_count as process_count
from xla_core.execution.ordinals import process_index as process_index
from xla_core.execution.ordinals import world_size as world_size
from xla_core.recording import random_state, tensor_trees
from xla_core.recording.xla_tensor import XLATensor
from xla_core.support import counters, flags, flight_ring
from xla_core.torch_bridge import device_guard
from xla_core.torch_features import saving

_Reducer: TypeAlias = Callable[[torch.optim.Optimizer, Sequence[Sequence[int]] | None, bool], None]


def device(index: int | None = None) -> torch.device:
    """The ``xla`` device with this index, which becomes the thread's current device (default: the current device).

    Raises IndexError, which names the devices, if none has this index, and RuntimeError if there is no device.
    """
    known = devices()
    if index is None:
        return known[min(device_guard.current_index(), len(known) - 1)]
    if not 0 <= index < len(known):
        raise IndexError(f"Device index {index} out of range in {[str(d) for d in known]}")
    device_guard.set_current_index(index)
    return known[index]


def devices() -> list[torch.device]:
    """All ``xla`` devices that this process addresses."""
    return [trace.device for trace in runtime.traces()]


def real_devices() -> list[str]:
    """The runtime's names of this process's devices, such as ``CPU:0``."""
    kind = runtime.device_type()
    return [f"{kind}:{d.id}" for d in runtime.client().local_devices()]


def real_name(device: torch.device | str) -> str:
    """The runtime's name of one ``xla`` device, such as ``CPU:0``."""
    description = runtime.client().local_devices()[runtime.trace_of(device).device.index]
    return f"{runtime.device_type()}:{description.id}"


def device_count() -> int:
    """The number of ``xla`` devices that this process addresses."""
    return len(runtime.traces())


def device_hardware(device: torch.device | str) -> str:
    """The kind of a device's hardware: ``'CPU'``, ``'TPU'``, ...; ``'CPU'`` for PyTorch's device ``cpu``.

    Raises RuntimeError for an ``xla`` device that does not exist.
    """
    device = torch.device(device)
    if device.type != "xla":
        return device.type.upper()
    runtime.trace_of(device)
    return runtime.device_type()


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """End the calling thread's step: run the pending operations of the current device, then the step closures.

    It returns when the work is enqueued; with ``wait`` (default: False), or with ``XLA_SYNC_WAIT=1`` in the
    environment, when it has finished. ``reset_scope`` is accepted and has no effect.
    """
    del reset_scope
    trace = runtime.trace_of(None)
    runtime.sync(trace.device)
    counters.increment("MarkStep")
    if wait or flags.SYNC_WAIT.get():
        trace.backend.wait()
    flight_ring.step()
    events.emit(events.StepMarked(device=trace.device))
    step_closures.run(trace.device)


def wait_device_ops(devices: Sequence[torch.device | str] = ()) -> None:
    """Wait until the programs launched on these devices (default: all) have finished."""
    runtime.wait([torch.device(d) for d in devices])


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: dict[str, object] | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    pin_layout: bool = True,
) -> object:
    """Reduce the gradients over the replicas, and return ``optimizer.step(**optimizer_args)``.

    ``barrier`` (default: False): call ``sync()`` afterwards. ``groups`` (default: all in one) are groups of
    replicas to reduce over, ``pin_layout`` is passed to the reduction. Raises RuntimeError if there are several
    replicas and the package xla-dist, which reduces over them, is not installed.
    """
    if groups or ordinals.world_size() > 1:
        if not _gradient_reducers:
            raise RuntimeError("optimizer_step() reduces over processes: pip install xla-dist")
        _gradient_reducers[0](optimizer, groups, pin_layout)
    loss = optimizer.step(**(optimizer_args or {}))
    if barrier:
        sync()
    return loss


_gradient_reducers: list[_Reducer] = []


def set_gradient_reducer(reduce: _Reducer) -> None:
    """Make ``optimizer_step`` call ``reduce(optimizer, groups, pin_layout)`` before the optimizer's step."""
    _gradient_reducers[:] = [reduce]


def set_rng_state(seed: int, device: torch.device | str | None = None) -> None:
    """Set the random state of one device (default: the current one)."""
    random_state.set_state(int(seed), runtime.trace_of(device).device.index)


def get_rng_state(device: torch.device | str | None = None) -> int:
    """The random state of one device (default: the current one), as ``set_rng_state`` takes it."""
    return random_state.get_state(runtime.trace_of(device).device.index)


class MemoryInfo(TypedDict):
    """What ``memory_info`` returns."""

    bytes_used: int
    bytes_limit: int | None
    peak_bytes_used: int
    kb_total: int | None
    kb_free: int | None


def memory_info(device: torch.device | str | None = None) -> MemoryInfo:
    """``bytes_used``, ``bytes_limit`` and ``peak_bytes_used`` of a device (default: the current one).

    ``kb_total`` and ``kb_free``, in KiB, are the names of releases before 2.3. If the device reports no limit,
    these two and ``bytes_limit`` are None.
    """
    runtime.settle()
    info = runtime.client().memory_info(runtime.trace_of(device).device.index)
    limit = info.bytes_limit
    return {
        "bytes_used": info.bytes_used,
        "bytes_limit": limit,
        "peak_bytes_used": info.peak_bytes_used,
        "kb_total": None if limit is None else limit // 1024,
        "kb_free": None if limit is None else max(0, limit - info.bytes_used) // 1024,
    }


@contextlib.contextmanager
def fork_rng(device: torch.device | str | None = None, enabled: bool = True) -> Iterator[None]:
    """Restore the random state of a device (default: the current one) after the block, if ``enabled``."""
    if not enabled:
        yield
        return
    state = get_rng_state(device)
    try:
        yield
    finally:
        set_rng_state(state, device)


def master_print(
    *args: object, fd: TextIO = sys.stdout, local: bool = False, flush: bool = False
) -> None:
    """``print`` to ``fd`` on the master ordinal only: the job's, or with ``local`` that of each host."""
    if is_master_ordinal(local=local):
        print(*args, file=fd, flush=flush)


def to_cpu(data: object, convert: bool = True) -> object:
    """A copy of ``data`` with each ``xla`` tensor inside moved to the CPU; ``data`` itself unless ``convert``.

    Tensors in dicts, lists, tuples, sets and dataclasses are moved, those in other attributes are not.
    """
    return tensor_trees.map_tensors(data, lambda t: t.cpu()) if convert else data


def save(
    data: object, file_or_path: object, master_only: bool = True, global_master: bool = False
) -> None:
    """Save ``data`` in the format of ``torch.save``, with ``xla`` tensors as CPU tensors.

    ``data`` is any structure that ``torch.save`` takes. A path is written under a temporary name and then renamed,
    so that an interrupted save leaves the former file. Host memory grows by about one tensor. By default one
    process per host writes; with ``global_master`` one of the job, and with ``master_only=False`` every process
    (each to a path of its own).
    """
    if not master_only or is_master_ordinal(local=not global_master):
        saving.save(data, file_or_path)


def save_streaming(
    data: object, path: object, master_only: bool = True, global_master: bool = False
) -> None:
    """``save`` under the parameter names of ``xser.save``: both stream one tensor at a time.

    ``data`` is any structure that ``torch.save`` takes; ``path`` is a file's path or an open file. With
    ``master_only`` one process per host writes, and with ``global_master`` one of the whole job.
    """
    save(data, path, master_only, global_master)


def is_xla_tensor(tensor: object) -> bool:
    """Whether ``tensor`` is a tensor on an ``xla`` device."""
    return isinstance(tensor, XLATensor)


def gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients of an optimizer's parameters that have one, in the order of the parameters."""
    groups = optimizer.__getstate__()["param_groups"]
    return [p.grad for group in groups for p in group["params"] if p.grad is not None]


def check_view_sharing(obj: object) -> None:
    """Raise RuntimeError if two tensors inside ``obj`` are different views of one storage.

    When moved to another device, such tensors no longer share memory.
    """
    seen: dict[int, XLATensor] = {}
    for tensor in tensor_trees.collect(obj, is_xla_tensor):
        other = seen.setdefault(id(tensor._s), tensor)
        if other is not tensor and other._v is not tensor._v:
            raise RuntimeError(
                f"tensors of shapes {tuple(other.shape)} and {tuple(tensor.shape)} are views of one storage; "
                "clone() one of them, or create the view again where it is used"
            )


def unlazy(tensors: Iterable[torch.Tensor]) -> None:
    """Run the pending operations on the devices of ``tensors``, and wait until they have finished."""
    for trace in {t._s.trace for t in tensors if isinstance(t, XLATensor)}:
        runtime.sync(trace.device, wait=True)
