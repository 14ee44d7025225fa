"""``CpuClient``: the device contract on jaxlib's CPU runtime."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from xla_core import _jax_compat as compat
from xla_core import stored
from xla_core.protocol import (
    INTERFACE_VERSION,
    ArraySpec,
    DeviceDescription,
    Executable,
    MemoryInfo,
    Outlining,
    Placement,
    Program,
    Topology,
)
from xla_pjrt_cpu.executable import PLUGIN, make_executable

_FALSE: Final = frozenset({"0", "false", "no", "off"})
_CPUINFO: Final = Path("/proc/cpuinfo")


def create_client(topology: Topology, options: Mapping[str, str]) -> CpuClient:
    """Entry point of the plugin.

    ``options`` (usually the process's environment): ``CPU_NUM_DEVICES``, default 1, is how many
    devices this process shows; ``PJRT_CPU_ASYNC_CLIENT``, default true, whether work is enqueued.
    """
    return CpuClient(
        topology,
        num_devices=topology.local_device_count or _device_count(options),
        asynchronous=options.get("PJRT_CPU_ASYNC_CLIENT", "1").strip().lower() not in _FALSE,
    )


def _device_count(options: Mapping[str, str]) -> int:
    text = options.get("CPU_NUM_DEVICES", "1")
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"CPU_NUM_DEVICES is {text!r}; set it to a whole number of at least 1")
    return int(text)


class CpuClient:
    """XLA on this machine's processors; ``num_devices`` devices share them."""

    interface_version = INTERFACE_VERSION
    device_type = "CPU"
    # XLA clones a function for each of its calls before it optimizes; with this option (jaxlib
    # 0.10.2), after, which halves the compile time of a 48-layer GPT.
    outlining = Outlining(
        wanted=True, options={compat.EXTRA_OPTIONS: "xla_cpu_flatten_after_fusion"}
    )

    def __init__(
        self, topology: Topology | None = None, *, num_devices: int = 1, asynchronous: bool = True
    ) -> None:
        topology = topology or Topology()
        self._client = compat.make_cpu_client(
            asynchronous=asynchronous,
            num_devices=num_devices,
            process_index=topology.process_index,
            process_count=topology.process_count,
            distributed_client=topology.distributed_client,
        )
        local = self._client.local_devices()
        self._local: list[compat.Device] = list(local)
        self._by_id = {device.id: device for device in self._client.devices()}
        self._descriptions = tuple(
            DeviceDescription(
                id=device.id,
                local_index=local.index(device) if device in local else -1,
                process_index=device.process_index,
                platform="cpu",
                kind=platform.machine() or "cpu",
            )
            for device in self._client.devices()
        )
        self._process_index = topology.process_index
        self._peak_bytes = [0] * len(self._local)
        # placement -> (sharding, addressable devices); a plain dict because put() is hot
        self._layouts: dict[Placement, tuple[Any, list[compat.Device]]] = {}

    # --- devices ---

    def devices(self) -> Sequence[DeviceDescription]:
        """All devices of the job, by id."""
        return self._descriptions

    def local_devices(self) -> Sequence[DeviceDescription]:
        """The devices of this process; ``xla:N`` is the Nth."""
        return tuple(d for d in self._descriptions if d.local_index >= 0)

    def _devices_of(self, placement: Placement) -> list[compat.Device]:
        try:
            return [self._by_id[i] for i in placement.devices]
        except KeyError as error:
            raise ValueError(
                f"there is no CPU device {error.args[0]}; this job has {sorted(self._by_id)}: "
                "CPU_NUM_DEVICES sets how many each process shows"
            ) from error

    def _layout(self, placement: Placement) -> tuple[Any, list[compat.Device]]:
        devices = self._devices_of(placement)
        if len(devices) == 1:
            sharding = compat.single_device_sharding(devices[0])
        else:
            sharding = compat.sharding_over(devices, compat.hlo_sharding(placement.sharding))
        mine = [device for device in devices if device.process_index == self._process_index]
        self._layouts[placement] = found = (sharding, mine)
        return found

    # --- transfers ---

    def put(self, array: np.ndarray, placement: Placement) -> Any:
        """Copy a host array to the device; the array may be changed once this returns."""
        sharding, devices = self._layouts.get(placement) or self._layout(placement)
        aval = compat.shaped_array(array.shape, array.dtype)
        if len(devices) == 1 and placement.sharding is None:
            return compat.device_put(aval, sharding, [array], devices)
        indices = sharding.addressable_devices_indices_map(array.shape)
        # one by one: jaxlib 0.10.2 fails on several at once when the value is partly replicated
        shards = [self._put_whole(array[indices[device]], device) for device in devices]
        return compat.assemble(aval, sharding, shards)

    def _put_whole(self, array: np.ndarray, device: compat.Device) -> Any:
        aval = compat.shaped_array(array.shape, array.dtype)
        return compat.device_put(aval, compat.single_device_sharding(device), [array], [device])

    def get(self, buffer: Any) -> np.ndarray:
        """Wait for a value and copy it to fresh host memory.

        Raises RuntimeError if its computation failed, or if this process lacks a part of it.
        """
        pieces = compat.single_device_arrays(buffer)
        if len(pieces) == 1 and pieces[0].shape == buffer.shape:
            return compat.to_host(pieces[0])
        indices = buffer.sharding.addressable_devices_indices_map(buffer.shape)
        if not (buffer.is_fully_addressable or buffer.is_fully_replicated):
            raise RuntimeError(
                f"the value of shape {buffer.shape} is spread over several processes; gather it "
                "in the program, or read shards()"
            )
        if buffer.is_fully_replicated:
            return compat.to_host(pieces[0])
        host = np.empty(buffer.shape, buffer.dtype)
        for piece in pieces:
            (device,) = piece.devices()
            host[indices[device]] = compat.to_host(piece)
        return host

    def copy(self, buffer: Any, placement: Placement) -> Any:
        """A second buffer with the same value on ``placement``; also on the same device."""
        # through the host: jaxlib copies between clients and layouts only inside its own backends
        return self.put(self.get(buffer), placement)

    def allocate(self, spec: ArraySpec, placement: Placement) -> Any:
        """A zero-filled buffer; the host array it comes from is untouched zero pages."""
        return self.put(np.zeros(spec.shape, spec.dtype), placement)

    def shards(self, buffer: Any) -> list[tuple[int, Any]]:
        """The addressable pieces as (device id, single-device buffer), sharing memory."""
        pieces = compat.single_device_arrays(buffer)
        return [(next(iter(piece.devices())).id, piece) for piece in pieces]

    def assemble(self, shards: Sequence[Any], spec: ArraySpec, placement: Placement) -> Any:
        """One logical buffer of this process's ``shards``, in the order of the placement's devices.

        Raises ValueError when their number or a shape does not fit.
        """
        sharding, devices = self._layouts.get(placement) or self._layout(placement)
        wanted = sharding.shard_shape(spec.shape)
        if len(shards) != len(devices) or any(s.shape != wanted for s in shards):
            raise ValueError(
                f"{[s.shape for s in shards]} are not {len(devices)} shards of shape {wanted}"
            )
        return compat.assemble(compat.shaped_array(spec.shape, spec.dtype), sharding, shards)

    def wait(self, buffers: Sequence[Any]) -> None:
        """Block until every buffer is computed. Raises RuntimeError if one failed."""
        compat.block_until_ready(buffers)

    # --- programs ---

    def compile(self, program: Program) -> Executable:
        """Compile for the program's placement. Raises RuntimeError with the compiler's message."""
        devices = self._devices_of(program.placement)
        options = self._options(program, shardy=_uses_shardy(program))
        loaded = self._client.compile_and_load(
            program.stablehlo, compat.DeviceList(tuple(devices)), options
        )
        return make_executable(self._client, loaded, program, devices)

    def deserialize(self, payload: bytes, program_name: str, placement: Placement) -> Executable:
        """Load a serialized executable, which runs code from ``payload``.

        Raises ValueError when it does not fit this client.
        """
        program, code = stored.unpack(PLUGIN, payload, program_name, placement)
        if b"lapack_" in code:
            compat.prepare_cpu_kernels()
        devices = self._devices_of(placement)
        options = self._options(program, shardy=_uses_shardy(program))
        try:
            loaded = self._client.deserialize_executable(
                code, compat.DeviceList(tuple(devices)), options
            )
        except RuntimeError as error:
            raise ValueError(
                f"{program_name}: the stored executable was refused: {error}"
            ) from error
        return make_executable(self._client, loaded, program, devices)

    def _options(self, program: Program, *, shardy: bool) -> compat.CompileOptions:
        ids = np.array(program.placement.devices, dtype=np.int64)
        shape = (program.num_replicas, program.num_partitions)
        if ids.size != shape[0] * shape[1]:
            raise ValueError(
                f"{program.name}: {shape[0]} replicas of {shape[1]} partitions need "
                f"{shape[0] * shape[1]} devices, the placement names {ids.size}"
            )
        return compat.compile_options(
            ids.reshape(shape), program.options, num_inputs=len(program.inputs), shardy=shardy
        )

    def fingerprint(self) -> Mapping[str, str]:
        """Versions of plugin and jaxlib, the processor's features, XLA flags, device counts."""
        return {
            "plugin": "xla-pjrt-cpu 0.1.0",
            "jaxlib": compat.JAXLIB_VERSION,
            "platform_version": self._client.platform_version,
            "processor": _processor(),
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "devices": f"{len(self._local)} of {len(self._by_id)}",
        }

    def numpy_dtype(self, dtype: np.dtype) -> np.dtype:
        """``dtype`` itself: the CPU keeps every number format."""
        return dtype

    def memory_info(self, local_index: int) -> MemoryInfo:
        """Bytes of live buffers on one device; the limit is the machine's memory.

        The runtime keeps no peak: ``peak_bytes_used`` is the most that any call so far has seen.
        """
        device = self._local[local_index]
        used = sum(
            piece.nbytes
            for array in self._client.live_arrays()
            if not array.is_deleted()
            for piece in compat.single_device_arrays(array)
            if device in piece.devices()
        )
        self._peak_bytes[local_index] = max(self._peak_bytes[local_index], used)
        return MemoryInfo(used, _physical_memory(), self._peak_bytes[local_index])

    def shutdown(self) -> None:
        """Drop the client; its threads end when the last buffer and executable are gone."""
        self._layouts.clear()
        self._by_id.clear()
        self._local.clear()
        self._client = None


@functools.cache
def _processor() -> str:
    """Name and hash of the instruction sets: XLA compiles for exactly this processor."""
    try:
        lines = _CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    facts = dict.fromkeys(
        line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))
    )
    return f"{platform.machine()} {hashlib.sha256(os.linesep.join(facts).encode()).hexdigest()}"


@functools.cache
def _physical_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _uses_shardy(program: Program) -> bool:
    # bytecode lists the dialects it uses, NUL-terminated; the two partitioners do not read each
    # other's annotations. Only several partitions need one at all.
    return program.num_partitions > 1 and b"sdy\0" in program.stablehlo
