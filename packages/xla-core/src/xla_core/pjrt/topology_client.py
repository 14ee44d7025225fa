"""``TopologyClient``: the device contract for a topology without chips (ahead-of-time compilation).

Programs are compiled by the real compiler; running one gives results that are shapes only. Nothing
is allocated on the host, whatever the size of the values.
"""

from __future__ import annotations

import base64
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Final

import numpy as np

from xla_core.contract import serialized_executable
from xla_core.contract.device_protocol import (
    INTERFACE_VERSION,
    ArraySpec,
    Capabilities,
    DeviceDescription,
    MemoryInfo,
    Outlining,
    Placement,
    Program,
)
from xla_core.contract.foreign_values import JsonObject, JsonValue
from xla_core.jax_bridge import jaxlib_runtime, pjrt_c_api
from xla_core.pjrt import tpu_memory
from xla_core.pjrt.client import compile_options, uses_shardy
from xla_core.pjrt.executable import (
    cost_figures,
    hlo_text,
    memory_figures,
    sharding_texts,
    with_cycles,
)

__all__ = [
    "READS",
    "ShapeBuffer",
    "TopologyClient",
    "TopologyExecutable",
]

READS: Final = ("error", "zeros")
"""What reading a value does: it is refused, or gives zeros."""

MSG_NO_VALUE: Final = (
    "there is no value to read: the program was compiled for the topology {topology}, which has no "
    "chips here, and tensors exist as shapes only ({what}). Leave the read out (.item(), .cpu(), "
    "print), or set XLA_AOT_READS=zeros to walk through the script with zeros"
)
MSG_DELETED: Final = "{who}: the buffer {what} was donated to an earlier run; it has no memory now"


class ShapeBuffer:
    """A value that has a shape, a dtype and a place, but no contents."""

    __slots__ = (
        "__weakref__", "deleted", "device_bytes", "dtype", "owner", "placement", "shape",
    )  # fmt: skip

    def __init__(
        self, owner: TopologyClient, shape: tuple[int, ...], dtype: np.dtype, placement: Placement
    ) -> None:
        self.owner = owner
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.placement = placement
        self.deleted = False
        self.device_bytes = owner.shard_bytes(shape, self.dtype, placement)
        owner.account(placement.devices, self.device_bytes)

    def __del__(self) -> None:
        if not getattr(self, "deleted", True):
            self.free()

    def free(self) -> None:
        """The memory is given back: by the last reference, or by donation."""
        self.deleted = True
        self.owner.account(self.placement.devices, -self.device_bytes)

    def is_ready(self) -> bool:
        """True: nothing is ever under way."""
        return True

    def is_deleted(self) -> bool:
        """Whether a run has taken this buffer's memory."""
        return self.deleted

    def check(self, who: str) -> None:
        """Raise RuntimeError naming ``who`` if the buffer was donated."""
        if self.deleted:
            raise RuntimeError(MSG_DELETED.format(who=who, what=f"{self.dtype}{list(self.shape)}"))


class TopologyExecutable:
    """A program compiled for chips that are not here.

    ``compiled`` is the compiler's, or None for one that comes from the persistent cache: then
    ``report`` holds what the compiler said, and ``code`` the executable.
    """

    def __init__(
        self,
        client: TopologyClient,
        program: Program,
        compiled: pjrt_c_api.CompiledProgram | None,
        *,
        report: Mapping[str, JsonValue] | None = None,
        code: bytes = b"",
    ) -> None:
        self.program_name = program.name
        self.run_count = 0
        self._client = client
        self._program = program
        self._compiled = compiled
        self._code = code
        self._report = report if report is not None else _report(compiled, program)
        where = program.placement.devices
        self._results = [
            (spec.shape, spec.dtype, Placement(where, sharding))
            for spec, sharding in zip(program.outputs, self.output_shardings(), strict=True)
        ]
        self._donated = [source for source, _ in program.aliases]

    def execute(self, arguments: Sequence[ShapeBuffer]) -> list[ShapeBuffer]:
        """Shapes of the results; inputs in the aliases cannot be used afterwards.

        Raises RuntimeError for a wrong number, shape or dtype, or for a donated argument.
        """
        program = self._program
        if len(arguments) != len(program.inputs):
            raise RuntimeError(
                f"{program.name} takes {len(program.inputs)} arguments, got {len(arguments)}"
            )
        for index, (argument, spec) in enumerate(zip(arguments, program.inputs, strict=True)):
            argument.check(f"{program.name}: argument {index}")
            if argument.shape != spec.shape or argument.dtype != spec.dtype:
                raise RuntimeError(
                    f"{program.name}: argument {index} is {argument.dtype}{argument.shape}, "
                    f"the program takes {spec.dtype}{spec.shape}"
                )
        for index in self._donated:
            arguments[index].free()
        results = [ShapeBuffer(self._client, *result) for result in self._results]
        self._client.note_peak(program.placement.devices, self._report["memory"]["temporaries"])
        self.run_count += 1
        return results

    def serialize(self) -> bytes:
        """The executable as a host with these chips loads it, and what the compiler said of it."""
        code, report = self._code, self._report
        if self._compiled is not None:
            code = self._compiled.serialize()
            packed = zlib.compress(hlo_text(self._compiled).encode(), 1)
            report = {**report, "hlo": base64.b85encode(packed).decode()}
        return serialized_executable.pack(self._client.plugin, self._program, code, report=report)

    def memory_analysis(self) -> Mapping[str, int]:
        """Bytes by use on one chip: ``arguments, outputs, temporaries, aliased, code``."""
        return dict(self._report["memory"])

    def cost_analysis(self) -> Mapping[str, float]:
        """The compiler's estimates (``flops``, ``bytes accessed``, ``estimated cycles``, ...)."""
        return with_cycles(self._report["cost"], self.optimized_hlo())

    def optimized_hlo(self) -> str:
        """The module that was compiled, after its passes, as HLO text with layouts."""
        if self._compiled is not None:
            return hlo_text(self._compiled)
        return zlib.decompress(base64.b85decode(self._report["hlo"])).decode()

    def input_shardings(self) -> tuple[str | None, ...]:
        """HLO sharding of each input as compiled; None where the whole value is on each device."""
        return tuple(self._report["input_shardings"])

    def output_shardings(self) -> tuple[str | None, ...]:
        """HLO sharding of each output as compiled; None where the whole value is on each device."""
        return tuple(self._report["output_shardings"])


class TopologyClient:
    """Devices of a topology, to compile for; subclass it with the plugin's names.

    ``devices`` are the library's for ``topology``. ``reads`` says what reading a value does:
    ``error`` or ``zeros``. ``memory_bytes`` is one device's memory, None if it is not known.
    Raises ValueError for another ``reads``.
    """

    interface_version = INTERFACE_VERSION
    device_type = ""
    outlining = Outlining()

    @property
    def capabilities(self) -> Capabilities:
        """Buffers have no values."""
        return Capabilities(shapes_only=True, outlining=self.outlining)

    plugin: ClassVar[str] = ""
    platform: ClassVar[str] = ""

    def __init__(
        self,
        devices: Sequence[jaxlib_runtime.Device],
        *,
        topology: str,
        reads: str = "error",
        memory_bytes: int | None = None,
    ) -> None:
        if reads not in READS:
            raise ValueError(f"XLA_AOT_READS is {reads!r}; set it to one of {', '.join(READS)}")
        self.topology = topology
        self._reads = reads
        self._memory_bytes = memory_bytes
        self._by_id = {device.id: device for device in devices}
        self._descriptions = tuple(
            DeviceDescription(
                id=device.id,
                local_index=index,
                process_index=0,
                platform=self.platform,
                kind=device.device_kind,
                attributes=pjrt_c_api.device_attributes(device)
                | {"host": device.process_index, "topology": topology},
            )
            for index, device in enumerate(devices)
        )
        self._lock = threading.Lock()
        self._live = dict.fromkeys(self._by_id, 0)
        self._peak = dict(self._live)
        self._shapes: dict[tuple[object, ...], int] = {}

    # --- devices ---

    def devices(self) -> Sequence[DeviceDescription]:
        """All devices of the topology, by id."""
        return self._descriptions

    def local_devices(self) -> Sequence[DeviceDescription]:
        """All devices: one process acts for the whole job."""
        return self._descriptions

    def _devices_of(self, placement: Placement) -> list[jaxlib_runtime.Device]:
        try:
            return [self._by_id[i] for i in placement.devices]
        except KeyError as error:
            raise ValueError(
                f"there is no device {error.args[0]} in the topology {self.topology}; it has 0 to "
                f"{len(self._by_id) - 1}"
            ) from error

    # --- transfers ---

    def put(self, array: np.ndarray, placement: Placement) -> ShapeBuffer:
        """A shape like the array's; its values are not kept."""
        self._devices_of(placement)
        return ShapeBuffer(self, tuple(array.shape), array.dtype, placement)

    def get(self, buffer: ShapeBuffer) -> np.ndarray:
        """Zeros, if they were asked for; otherwise raises RuntimeError: there is no value."""
        buffer.check("get")
        if self._reads == "zeros":
            return np.zeros(buffer.shape, buffer.dtype)
        what = f"this one is {buffer.dtype}{list(buffer.shape)}"
        raise RuntimeError(MSG_NO_VALUE.format(topology=self.topology, what=what))

    def copy(self, buffer: ShapeBuffer, placement: Placement) -> ShapeBuffer:
        """A second shape."""
        buffer.check("copy")
        self._devices_of(placement)
        return ShapeBuffer(self, buffer.shape, buffer.dtype, placement)

    def allocate(self, spec: ArraySpec, placement: Placement) -> ShapeBuffer:
        """A shape; nothing is allocated."""
        self._devices_of(placement)
        return ShapeBuffer(self, spec.shape, spec.dtype, placement)

    def placement_of(self, buffer: ShapeBuffer) -> Placement:
        """Where the buffer was put, or the program that made it runs."""
        return buffer.placement

    def shards(self, buffer: ShapeBuffer) -> list[tuple[int, ShapeBuffer]]:
        """The shape of the part that each device holds."""
        buffer.check("shards")
        where = buffer.placement
        shape = self.shard_shape(buffer.shape, where)
        return [(i, ShapeBuffer(self, shape, buffer.dtype, Placement((i,)))) for i in where.devices]

    def assemble(
        self, shards: Sequence[ShapeBuffer], spec: ArraySpec, placement: Placement
    ) -> ShapeBuffer:
        """The shape of the whole. Raises ValueError when number or shapes do not fit."""
        wanted = self.shard_shape(spec.shape, placement)
        if len(shards) != len(placement.devices) or any(s.shape != wanted for s in shards):
            count = len(placement.devices)
            raise ValueError(f"{[s.shape for s in shards]} are not {count} shards of {wanted}")
        return self.allocate(spec, placement)

    def wait(self, buffers: Sequence[ShapeBuffer]) -> None:
        """Check that every buffer is still there: nothing is ever under way."""
        for buffer in buffers:
            buffer.check("wait")

    # --- programs ---

    def compile(self, program: Program) -> TopologyExecutable:
        """Compile for the program's placement. Raises RuntimeError with the compiler's message."""
        devices = self._devices_of(program.placement)
        options = compile_options(program, shardy=uses_shardy(program))
        compiled = pjrt_c_api.compile_for_topology(devices, program.stablehlo, options)
        return TopologyExecutable(self, program, compiled)

    def deserialize(
        self, payload: bytes, program_name: str, placement: Placement
    ) -> TopologyExecutable:
        """What ``serialize`` wrote, for its figures. Raises ValueError for anything else."""
        program, code = serialized_executable.unpack(self.plugin, payload, program_name, placement)
        report = serialized_executable.report(payload)
        if report is None:
            raise ValueError(f"{program_name}: stored on hardware, without the compiler's report")
        self._devices_of(placement)
        memory = report["memory"]
        # an entry that an older version of this package stored has the number that PJRT reported
        exact = tpu_memory.without_gaps(memory["temporaries"], code)
        report = {**report, "memory": {**memory, "temporaries": exact}}
        return TopologyExecutable(self, program, None, report=report, code=code)

    def fingerprint(self) -> Mapping[str, str]:
        """What compiled code depends on; a plugin makes it equal to that of a client with chips."""
        return {"plugin": self.plugin, "topology": self.topology}

    def numpy_dtype(self, dtype: np.dtype) -> np.dtype:
        """``dtype`` itself, where a device keeps every number format."""
        return dtype

    # --- memory ---

    def memory_info(self, local_index: int) -> MemoryInfo:
        """Bytes of live shapes on one device, without padding; the peak adds programs' temporaries."""
        device = self._descriptions[local_index].id
        with self._lock:
            used, peak = self._live[device], self._peak[device]
        return MemoryInfo(used, self._memory_bytes, max(used, peak))

    def account(self, devices: Iterable[int], change: int) -> None:
        """Add to the bytes in use on ``devices``."""
        with self._lock:
            for device in devices:
                if device in self._live:
                    now = self._live[device] = self._live[device] + change
                    if now > self._peak[device]:
                        self._peak[device] = now

    def note_peak(self, devices: Iterable[int], temporaries: int) -> None:
        """Note that a program with this number of bytes of temporaries has run on ``devices``."""
        with self._lock:
            for device in devices:
                self._peak[device] = max(self._peak[device], self._live[device] + temporaries)

    def shard_shape(self, shape: tuple[int, ...], placement: Placement) -> tuple[int, ...]:
        """The shape of one device's part of a value."""
        if placement.sharding is None:
            return shape
        sharding = jaxlib_runtime.hlo_sharding(placement.sharding)
        laid = jaxlib_runtime.sharding_over(self._devices_of(placement), sharding)
        return tuple(laid.shard_shape(pjrt_c_api.padded_shape(laid, shape)))

    def shard_bytes(self, shape: tuple[int, ...], dtype: np.dtype, placement: Placement) -> int:
        """Bytes of one device's part of a value."""
        key = (shape, dtype, placement.sharding, len(placement.devices))
        size = self._shapes.get(key)
        if size is None:
            part = self.shard_shape(shape, placement)
            size = self._shapes[key] = int(np.prod(part, dtype=np.int64)) * dtype.itemsize
        return size

    def shutdown(self) -> None:
        """Forget the devices."""
        self._by_id.clear()
        self._descriptions = ()


def _report(compiled: pjrt_c_api.CompiledProgram, program: Program) -> JsonObject:
    """What the compiler says, in a form that is stored beside the code."""
    several = program.num_partitions > 1
    inputs = compiled.get_parameter_shardings() if several else None
    outputs = compiled.get_output_shardings() if several else None
    return {
        "memory": memory_figures(compiled, compiled.serialize),
        "cost": cost_figures(compiled),
        "input_shardings": sharding_texts(inputs, len(program.inputs)),
        "output_shardings": sharding_texts(outputs, len(program.outputs)),
    }
