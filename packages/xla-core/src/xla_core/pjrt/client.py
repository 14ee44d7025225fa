"""``PjrtClient``: the device contract on a jaxlib client, what is common to all hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

import numpy as np

from xla_core.contract import serialized_executable
from xla_core.contract.device_protocol import (
    INTERFACE_VERSION,
    ArraySpec,
    Buffer,
    Capabilities,
    DeviceDescription,
    Executable,
    MemoryInfo,
    Outlining,
    Placement,
    Program,
)
from xla_core.contract.foreign_values import ForeignObject
from xla_core.jax_bridge import jaxlib_runtime, pjrt_c_api
from xla_core.jax_bridge.traced_values import JaxObject
from xla_core.pjrt import executable
from xla_core.pjrt.executable import (
    CheckedExecutable,
    PjrtExecutable,
    ShardedPjrtExecutable,
)
from xla_core.support import indivisible

__all__ = [
    "DEVICE_CODE",
    "PjrtClient",
    "compile_options",
    "uses_shardy",
]

DEVICE_CODE: Final = frozenset(
    {jaxlib_runtime.__name__, executable.__name__, indivisible.__name__, __name__}
)
"""The modules in which a thread is while it waits for its device; a launch is one of the things done as a whole."""


class PjrtClient:
    """One jaxlib client as a ``DeviceClient``; a plugin subclasses it and adds what is its own.

    ``client`` runs already. ``plugin`` is the plugin's name, which stored executables carry, and
    ``version`` is part of the fingerprint. ``platform`` is the one of jax's platforms (``cpu``,
    ``tpu``, ``cuda``) whose lowering rules suit the device.
    """

    interface_version = INTERFACE_VERSION
    device_type = ""
    outlining = Outlining()

    @property
    def capabilities(self) -> Capabilities:
        """What this client can do in addition to the contract's methods."""
        return Capabilities(
            outlining=self.outlining,
            rehearse=getattr(self, "rehearse", None),
            compiles_beside=True,
        )

    plugin: ClassVar[str] = ""
    version: ClassVar[str] = ""
    platform: ClassVar[str] = "cpu"
    checks_arguments: ClassVar[bool] = True
    """False: the runtime itself refuses arguments of another shape, dtype or number."""
    executable_type: ClassVar[type[PjrtExecutable]] = PjrtExecutable
    """What programs on one device are, where the runtime checks arguments."""
    missing_device: ClassVar[str] = ""
    """What to do where a device id is not there, for the error's end."""

    def __init__(self, client: jaxlib_runtime.Client, *, process_index: int = 0) -> None:
        self._client = client
        local = client.local_devices()
        self._local: list[jaxlib_runtime.Device] = list(local)
        self._by_id = {device.id: device for device in client.devices()}
        self._descriptions = tuple(
            self._describe(device, local.index(device) if device in local else -1)
            for device in client.devices()
        )
        self._process_index = process_index
        self._peak_bytes = [0] * len(self._local)
        # placement -> (sharding, addressable devices); a plain dict because put() is hot
        self._layouts: dict[Placement, tuple[JaxObject, list[jaxlib_runtime.Device]]] = {}
        # id of a sharding over several devices -> itself, to keep the id, and its placement
        self._placements: dict[int, tuple[object, Placement]] = {}

    # --- devices ---

    def _describe(self, device: jaxlib_runtime.Device, local_index: int) -> DeviceDescription:
        return DeviceDescription(
            id=device.id,
            local_index=local_index,
            process_index=device.process_index,
            platform=self.platform,
            kind=self._kind(device),
            attributes=pjrt_c_api.device_attributes(device),
        )

    def _kind(self, device: jaxlib_runtime.Device) -> str:
        return device.device_kind or self.platform

    @property
    def platform_version(self) -> str:
        """The version of the runtime, as it tells it."""
        return self._client.platform_version

    def devices(self) -> Sequence[DeviceDescription]:
        """All devices of the job, by id."""
        return self._descriptions

    def local_devices(self) -> Sequence[DeviceDescription]:
        """The devices of this process; ``xla:N`` is the Nth."""
        mine = [d for d in self._descriptions if d.local_index >= 0]
        return tuple(sorted(mine, key=lambda d: d.local_index))

    def _devices_of(self, placement: Placement) -> list[jaxlib_runtime.Device]:
        try:
            return [self._by_id[i] for i in placement.devices]
        except KeyError as error:
            raise ValueError(
                f"there is no {self.device_type} device {error.args[0]}; this job has "
                f"{sorted(self._by_id)}{self.missing_device}"
            ) from error

    def _layout(self, placement: Placement) -> tuple[JaxObject, list[jaxlib_runtime.Device]]:
        devices = self._devices_of(placement)
        if len(devices) == 1:
            sharding = jaxlib_runtime.single_device_sharding(devices[0])
        else:
            sharding = jaxlib_runtime.sharding_over(
                devices, jaxlib_runtime.hlo_sharding(placement.sharding)
            )
        mine = [device for device in devices if device.process_index == self._process_index]
        self._layouts[placement] = layout = (sharding, mine)
        return layout

    # --- transfers ---

    def put(self, array: np.ndarray, placement: Placement) -> jaxlib_runtime.Array:
        """Copy a host array to the device; the array may be changed once this returns."""
        sharding, devices = self._layouts.get(placement) or self._layout(placement)
        aval = jaxlib_runtime.shaped_array(array.shape, array.dtype)
        if len(devices) == 1 and placement.sharding is None:
            return jaxlib_runtime.device_put(aval, sharding, [array], devices)
        padded = pjrt_c_api.padded_shape(sharding, array.shape)
        indices = sharding.addressable_devices_indices_map(padded)
        part = sharding.shard_shape(padded)
        # one by one: jaxlib 0.10.2 fails on several at once when the value is partly replicated
        shards = [
            self._put_whole(_filled_up(array[indices[device]], part), device) for device in devices
        ]
        return jaxlib_runtime.assemble(aval, sharding, shards)

    def _put_whole(self, array: np.ndarray, device: jaxlib_runtime.Device) -> Buffer:
        aval = jaxlib_runtime.shaped_array(array.shape, array.dtype)
        return jaxlib_runtime.device_put(
            aval, jaxlib_runtime.single_device_sharding(device), [array], [device]
        )

    def get(self, buffer: jaxlib_runtime.Array) -> np.ndarray:
        """Wait for a value and copy it to fresh host memory.

        Raises RuntimeError if its computation failed, or if this process lacks a part of it.
        """
        pieces = jaxlib_runtime.single_device_arrays(buffer)
        if len(pieces) == 1 and pieces[0].shape == buffer.shape:
            return jaxlib_runtime.to_host(pieces[0])
        padded = pjrt_c_api.padded_shape(buffer.sharding, buffer.shape)
        indices = buffer.sharding.addressable_devices_indices_map(padded)
        if not (buffer.is_fully_addressable or buffer.is_fully_replicated):
            raise RuntimeError(
                f"the value of shape {buffer.shape} is spread over several processes; gather it "
                "in the program, or read shards()"
            )
        if buffer.is_fully_replicated:
            return jaxlib_runtime.to_host(pieces[0])
        host = np.empty(buffer.shape, buffer.dtype)
        for piece in pieces:
            (device,) = piece.devices()
            part = host[indices[device]]
            if part.size:
                part[...] = jaxlib_runtime.to_host(piece)[tuple(map(slice, part.shape))]
        return host

    def copy(self, buffer: Buffer, placement: Placement) -> Buffer:
        """A second buffer with the same value on ``placement``; also on the same device."""
        sharding, devices = self._layouts.get(placement) or self._layout(placement)
        pieces = jaxlib_runtime.single_device_arrays(buffer)
        if len(pieces) == 1 and len(devices) == 1 and placement.sharding is None:
            return pjrt_c_api.copy_to_devices(pieces[0], sharding, devices)
        # through the host: jaxlib copies between layouts only inside its own backends
        return self.put(self.get(buffer), placement)

    def take_dlpack(self, array: ForeignObject, placement: Placement) -> Buffer:
        """A buffer with the values of an object with ``__dlpack__`` in the memory of one of this process's devices.

        They are copied by the device. Raises BufferError where that memory, or its number format, is not the
        runtime's.
        """
        _, number = array.__dlpack_device__()
        origin = next((d for d in self._local if jaxlib_runtime.hardware_id(d) == number), None)
        if origin is None:
            raise BufferError(
                f"no {self.device_type} device of this process has the number {number}"
            )
        copied = self.copy(pjrt_c_api.from_dlpack(array, origin), placement)
        # the owner may free the memory as soon as this returns, and does not know of the copy
        jaxlib_runtime.block_until_ready([copied])
        return copied

    def allocate(self, spec: ArraySpec, placement: Placement) -> Buffer:
        """A zero-filled buffer; the host array it comes from is untouched zero pages."""
        return self.put(np.zeros(spec.shape, spec.dtype), placement)

    def placement_of(self, buffer: jaxlib_runtime.Array) -> Placement:
        """The buffer's devices in order, and its sharding if it is split over them."""
        sharding = buffer.sharding
        known = self._placements.get(id(sharding))
        if known is not None:
            return known[1]
        placement = Placement(*pjrt_c_api.devices_and_sharding(sharding))
        if len(placement.devices) > 1:
            self._placements[id(sharding)] = (sharding, placement)
        return placement

    def shards(self, buffer: Buffer) -> list[tuple[int, Buffer]]:
        """The addressable pieces as (device id, single-device buffer), sharing memory."""
        pieces = jaxlib_runtime.single_device_arrays(buffer)
        return [(next(iter(piece.devices())).id, piece) for piece in pieces]

    def assemble(
        self, shards: Sequence[jaxlib_runtime.Array], spec: ArraySpec, placement: Placement
    ) -> Buffer:
        """One logical buffer of this process's ``shards``, in the order of the placement's devices.

        Raises ValueError when their number or a shape does not fit.
        """
        sharding, devices = self._layouts.get(placement) or self._layout(placement)
        wanted = sharding.shard_shape(pjrt_c_api.padded_shape(sharding, spec.shape))
        if len(shards) != len(devices) or not all(_is_shard(s, wanted) for s in shards):
            raise ValueError(
                f"{[s.shape for s in shards]} are not {len(devices)} shards of shape {wanted}"
            )
        return jaxlib_runtime.assemble(
            jaxlib_runtime.shaped_array(spec.shape, spec.dtype), sharding, shards
        )

    def wait(self, buffers: Sequence[Buffer]) -> None:
        """Block until every buffer is computed. Raises RuntimeError if one failed."""
        jaxlib_runtime.block_until_ready(buffers)

    # --- programs ---

    def compile(self, program: Program) -> Executable:
        """Compile for the program's placement. Raises RuntimeError with the compiler's message.

        Where a library does not know the program's version of StableHLO, that names both versions.
        """
        return self.compile_module(program, program.stablehlo)

    def compile_module(self, program: Program, module: object) -> Executable:
        """``compile``, for a plugin that has read the program; ``module`` is its bytecode, or that parsed."""
        devices = self._devices_of(program.placement)
        options = compile_options(program, shardy=uses_shardy(program))
        try:
            loaded = self._client.compile_and_load(
                module, jaxlib_runtime.DeviceList(tuple(devices)), options
            )
        except RuntimeError as error:
            misfit = pjrt_c_api.stablehlo_misfit(self._client, error)
            if misfit is None:
                raise
            raise RuntimeError(f"{self.platform}: {misfit}") from error
        return self._executable(loaded, program, devices)

    def deserialize(self, payload: bytes, program_name: str, placement: Placement) -> Executable:
        """Load a serialized executable, which runs code from ``payload``.

        Raises ValueError when it does not fit this client.
        """
        program, code = serialized_executable.unpack(self.plugin, payload, program_name, placement)
        self._prepare(code)
        devices = self._devices_of(placement)
        options = compile_options(program, shardy=uses_shardy(program))
        try:
            loaded = self._client.deserialize_executable(
                code, jaxlib_runtime.DeviceList(tuple(devices)), options
            )
        except RuntimeError as error:
            raise ValueError(
                f"{program_name}: the stored executable was refused: {error}"
            ) from error
        return self._executable(loaded, program, devices)

    def _prepare(self, code: bytes) -> None:
        """Get ready what stored ``code`` calls by name; a plugin's own."""

    def _executable(
        self, loaded: object, program: Program, devices: Sequence[jaxlib_runtime.Device]
    ) -> PjrtExecutable:
        if len(devices) > 1:
            kind: type[PjrtExecutable] = ShardedPjrtExecutable
        else:
            kind = CheckedExecutable if self.checks_arguments else self.executable_type
        return kind(self._client, loaded, program, devices, self.plugin)

    def fingerprint(self) -> Mapping[str, str]:
        """Versions of plugin, jaxlib and runtime, and the devices."""
        return {
            "plugin": f"{self.plugin} {self.version}",
            "jaxlib": jaxlib_runtime.JAXLIB_VERSION,
            "platform_version": self.platform_version,
            "devices": f"{len(self._local)} of {len(self._by_id)}",
        }

    def numpy_dtype(self, dtype: np.dtype) -> np.dtype:
        """``dtype`` itself, where a device keeps every number format."""
        return dtype

    def memory_info(self, local_index: int) -> MemoryInfo:
        """The allocator's figures; where it keeps none, the bytes of live buffers.

        A runtime without figures keeps no peak either: then ``peak_bytes_used`` is the most that
        any call so far has seen.
        """
        device = self._local[local_index]
        stats = pjrt_c_api.memory_stats(device)
        if stats:
            used = stats["bytes_in_use"]
            peak = max(used, stats.get("peak_bytes_in_use", 0))
            return MemoryInfo(used, stats.get("bytes_limit"), peak)
        used = self._live_bytes(device)
        self._peak_bytes[local_index] = max(self._peak_bytes[local_index], used)
        return MemoryInfo(used, self._memory_limit(), self._peak_bytes[local_index])

    def _live_bytes(self, device: jaxlib_runtime.Device) -> int:
        pieces = [
            piece
            for array in self._client.live_arrays()
            if array.nbytes and not array.is_deleted()
            for piece in jaxlib_runtime.single_device_arrays(array)
            if device in piece.devices()
        ]
        # whoever reads an array may make a second one of the same memory
        sizes = {jaxlib_runtime.address_of(piece): piece.nbytes for piece in pieces}
        return sum(sizes.values())

    def _memory_limit(self) -> int | None:
        return None

    def shutdown(self) -> None:
        """Drop the client; its threads end when the last buffer and executable are freed."""
        self._layouts.clear()
        self._placements.clear()
        jaxlib_runtime.forget_shardings(list(self._by_id.values()))
        self._by_id.clear()
        self._local.clear()
        self._client = None


def _is_shard(piece: jaxlib_runtime.Array, shape: tuple[int, ...]) -> bool:
    """Whether a single-device buffer is of this shape.

    A piece of a value that does not divide is as large as the others, but says that it ends with the value
    (jaxlib 0.10.2): its own memory is asked.
    """
    return piece.shape == shape or jaxlib_runtime.to_host(piece).shape == shape


def _filled_up(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """``array`` with zeros after its elements, so that it has ``shape``."""
    if array.shape == shape:
        return array
    return np.pad(array, [(0, n - m) for n, m in zip(shape, array.shape, strict=True)])


def compile_options(program: Program, *, shardy: bool) -> jaxlib_runtime.CompileOptions:
    """The runtime's options for a program. Raises ValueError where placement and counts do not agree."""
    ids = np.array(program.placement.devices, dtype=np.int64)
    shape = (program.num_replicas, program.num_partitions)
    if ids.size != shape[0] * shape[1]:
        raise ValueError(
            f"{program.name}: {shape[0]} replicas of {shape[1]} partitions need "
            f"{shape[0] * shape[1]} devices, the placement names {ids.size}"
        )
    return jaxlib_runtime.compile_options(
        ids.reshape(shape), program.options, num_inputs=len(program.inputs), shardy=shardy
    )


def uses_shardy(program: Program) -> bool:
    """Whether a program's shardings are Shardy's; only several partitions need a partitioner."""
    # bytecode lists the dialects it uses, NUL-terminated; the two partitioners do not read each
    # other's annotations.
    return program.num_partitions > 1 and b"sdy\0" in program.stablehlo
