"""A device without a compiler (``PJRT_DEVICE=NULL``): tests of the trace and the caches use it.

Transfers are real. Running a program gives zeros of the right shapes and dtypes, whatever the
program says; donation and the counts of compilations and runs are those of a real device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from xla_core.contract import serialized_executable
from xla_core.contract.device_protocol import (
    INTERFACE_VERSION,
    ArraySpec,
    DeviceDescription,
    MemoryInfo,
    Placement,
    Program,
    Topology,
)

PLUGIN: Final = "xla-core null device"

MSG_DELETED: Final = "{who}: this buffer was donated to an earlier run and has no value any more"


class NullBuffer:
    """A host array in the place of device memory."""

    __slots__ = ("__weakref__", "dtype", "placement", "shape", "value")

    def __init__(self, value: np.ndarray, placement: Placement) -> None:
        self.value: np.ndarray | None = value
        self.placement = placement
        self.shape = value.shape
        self.dtype = value.dtype

    def is_ready(self) -> bool:
        """True: nothing is ever under way."""
        return True

    def is_deleted(self) -> bool:
        """Whether a run has taken this buffer's memory."""
        return self.value is None

    def read(self, who: str) -> np.ndarray:
        """The value itself. Raises RuntimeError that names ``who`` if it was donated."""
        if self.value is None:
            raise RuntimeError(MSG_DELETED.format(who=who))
        return self.value


class NullExecutable:
    """A program that gives zeros."""

    def __init__(self, client: NullClient, program: Program) -> None:
        self.program_name = program.name
        self.execute_count = 0
        self._client = client
        self._program = program
        self._donated = tuple(source for source, _ in program.aliases)

    def execute(self, arguments: Sequence[NullBuffer]) -> list[NullBuffer]:
        """Zeros in the shape and dtype of each output; inputs in the aliases cannot be used afterwards.

        Raises RuntimeError for a wrong number, a wrong shape or dtype, or a donated argument.
        """
        program = self._program
        if len(arguments) != len(program.inputs):
            raise RuntimeError(
                f"{program.name} takes {len(program.inputs)} arguments, got {len(arguments)}"
            )
        for index, (argument, spec) in enumerate(zip(arguments, program.inputs, strict=True)):
            value = argument.read(f"{program.name}: argument {index}")
            if value.shape != spec.shape or value.dtype != spec.dtype:
                raise RuntimeError(
                    f"{program.name}: argument {index} is {value.dtype}{value.shape}, "
                    f"the program takes {spec.dtype}{spec.shape}"
                )
        for index in self._donated:
            arguments[index].value = None
        self.execute_count += 1
        self._client.execute_count += 1
        where = Placement(program.placement.devices)
        return [NullBuffer(np.zeros(s.shape, s.dtype), where) for s in program.outputs]

    def serialize(self) -> bytes:
        """The description of the program: there is no code."""
        return serialized_executable.pack(PLUGIN, self._program, b"")

    def memory_analysis(self) -> Mapping[str, int]:
        """Bytes of arguments, outputs and aliased inputs; no temporaries and no code."""
        program = self._program
        return {
            "arguments": sum(map(_size, program.inputs)),
            "outputs": sum(map(_size, program.outputs)),
            "temporaries": 0,
            "aliased": sum(_size(program.inputs[i]) for i in self._donated),
            "code": 0,
        }

    def cost_analysis(self) -> Mapping[str, float]:
        """Empty: nothing is estimated."""
        return {}

    def optimized_hlo(self) -> str:
        """Empty: nothing is compiled."""
        return ""

    def input_shardings(self) -> tuple[str | None, ...]:
        """None for each input: values are kept whole."""
        return (None,) * len(self._program.inputs)

    def output_shardings(self) -> tuple[str | None, ...]:
        """None for each output: values are kept whole."""
        return (None,) * len(self._program.outputs)


class NullClient:
    """``num_devices`` devices of host memory; counts ``compile_count`` and ``execute_count``."""

    interface_version = INTERFACE_VERSION
    device_type = "NULL"

    def __init__(self, topology: Topology | None = None, *, num_devices: int = 1) -> None:
        topology = topology or Topology()
        self.compile_count = 0
        self.deserialize_count = 0
        self.execute_count = 0
        self._descriptions = tuple(
            DeviceDescription(
                id=process * num_devices + index,
                local_index=index if process == topology.process_index else -1,
                process_index=process,
                platform="cpu",
                kind="null",
            )
            for process in range(topology.process_count)
            for index in range(num_devices)
        )

    def devices(self) -> Sequence[DeviceDescription]:
        """All devices of the job, by id."""
        return self._descriptions

    def local_devices(self) -> Sequence[DeviceDescription]:
        """The devices of this process."""
        return tuple(d for d in self._descriptions if d.local_index >= 0)

    def put(self, array: np.ndarray, placement: Placement) -> NullBuffer:
        """A copy of ``array``, kept whole whatever the sharding.

        Raises ValueError for a device that is not there.
        """
        known = range(len(self._descriptions))
        missing = [device for device in placement.devices if device not in known]
        if missing:
            raise ValueError(f"there is no NULL device {missing[0]}; this job has {len(known)}")
        return NullBuffer(np.array(array, copy=True, order="C"), placement)

    def get(self, buffer: NullBuffer) -> np.ndarray:
        """A copy of the value."""
        return buffer.read("get").copy()

    def copy(self, buffer: NullBuffer, placement: Placement) -> NullBuffer:
        """A second buffer with the same value."""
        return self.put(buffer.read("copy"), placement)

    def allocate(self, spec: ArraySpec, placement: Placement) -> NullBuffer:
        """A buffer of zeros."""
        return self.put(np.zeros(spec.shape, spec.dtype), placement)

    def placement_of(self, buffer: NullBuffer) -> Placement:
        """Where the buffer was put, or the program that made it ran."""
        return buffer.placement

    def shards(self, buffer: NullBuffer) -> list[tuple[int, NullBuffer]]:
        """The value as the one part of each device that holds it whole.

        Raises NotImplementedError for a tiled buffer: this device keeps values whole.
        """
        if buffer.placement.sharding is not None:
            raise NotImplementedError(
                "the NULL device keeps sharded values whole; use PJRT_DEVICE=CPU"
            )
        value = buffer.read("shards")
        return [(i, NullBuffer(value, Placement((i,)))) for i in buffer.placement.devices]

    def assemble(
        self, shards: Sequence[NullBuffer], spec: ArraySpec, placement: Placement
    ) -> NullBuffer:
        """One buffer of whole values, of which the first is kept.

        Raises ValueError when their number or a shape does not fit.
        """
        if len(shards) != len(placement.devices) or any(s.shape != spec.shape for s in shards):
            wanted = f"{len(placement.devices)} values of {spec.shape}"
            raise ValueError(f"{[s.shape for s in shards]} are not {wanted}")
        return NullBuffer(shards[0].read("assemble"), placement)

    def compile(self, program: Program) -> NullExecutable:
        """Look at the program's shapes only."""
        self.compile_count += 1
        return NullExecutable(self, program)

    def deserialize(
        self, payload: bytes, program_name: str, placement: Placement
    ) -> NullExecutable:
        """Load what ``serialize`` gave. Raises ValueError for anything else."""
        program, _ = serialized_executable.unpack(PLUGIN, payload, program_name, placement)
        self.deserialize_count += 1
        return NullExecutable(self, program)

    def wait(self, buffers: Sequence[NullBuffer]) -> None:
        """Check that every buffer still has its value: all work is done when it is asked for."""
        for buffer in buffers:
            buffer.read("wait")

    def fingerprint(self) -> Mapping[str, str]:
        """This file's own contents: it is all that the results depend on."""
        return {"plugin": PLUGIN, "source": _source_hash()}

    def numpy_dtype(self, dtype: np.dtype) -> np.dtype:
        """``dtype`` itself."""
        return dtype

    def memory_info(self, local_index: int) -> MemoryInfo:
        """Zeros: host memory is not accounted for. Raises IndexError for a device it lacks."""
        _ = self.local_devices()[local_index]
        return MemoryInfo(0, None, 0)

    def shutdown(self) -> None:
        """Forget the devices."""
        self._descriptions = ()


def create_client(topology: Topology, options: Mapping[str, str]) -> NullClient:
    """Entry point ``null``; ``NULL_NUM_DEVICES`` in ``options``, default 1, is the device count."""
    count = topology.local_device_count or int(options.get("NULL_NUM_DEVICES", "1"))
    return NullClient(topology, num_devices=count)


def _size(spec: ArraySpec) -> int:
    return int(np.prod(spec.shape, dtype=np.int64)) * spec.dtype.itemsize


def _source_hash() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
