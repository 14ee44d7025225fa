"""The contract between xla-core and device plugins: all objects that they exchange.

A plugin does not use torch or traces. It gets StableHLO (``Program``) and host arrays, and returns opaque
``Buffer`` and ``Executable`` objects. The same contract serves one device, several devices of one process, meshes
over several processes, and topologies without chips (ahead-of-time compilation).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import numpy as np

from xla_core.contract.foreign_values import JsonValue

__all__ = [
    "ArraySpec",
    "Buffer",
    "Capabilities",
    "ClientFactory",
    "DeferredExecutable",
    "DeviceClient",
    "DeviceDescription",
    "Exchange",
    "Executable",
    "INTERFACE_VERSION",
    "Loops",
    "MemoryInfo",
    "OLDEST_INTERFACE_VERSION",
    "Outlining",
    "Placement",
    "Program",
    "ReplicaExecutable",
    "Topology",
    "capabilities_of",
]

INTERFACE_VERSION: Final = 2
"""The version of this contract; raised when something is added to it or changed."""
OLDEST_INTERFACE_VERSION: Final = 1
"""Plugins written for this version or a later one still work.

1: the first. 2: ``DeviceClient.capabilities`` instead of optional attributes, which are still read.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceDescription:
    """One device as the runtime numbers it.

    ``id`` is unique over all processes, ``local_index`` counts the devices this process can address (-1 for one
    it cannot), ``process_index`` is the number of the process that can. ``platform`` is the one of jax's
    platforms (``cpu``, ``tpu``, ``cuda``, ...) whose lowering rules suit the device. ``kind`` is the hardware's
    name, ``attributes`` what else the runtime tells (``coords``, ``core_on_chip``, ...).
    """

    id: int
    local_index: int
    process_index: int
    platform: str
    kind: str
    attributes: Mapping[str, JsonValue] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where an array or a program lives: global device ids, and how values are split over them.

    ``sharding`` is an HLO sharding in its text form; None means the whole value on every device
    in ``devices`` (the usual case: exactly one). All parts have one shape: a dimension that does not divide is
    padded to the next larger size that does, by ``put`` with zeros. The module declares its arguments and results
    with the larger size; ``ArraySpec`` has the value's own size. For a program, ``devices`` lists replicas times
    partitions, the partitions of a replica side by side.
    """

    devices: tuple[int, ...]
    sharding: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """What a process knows about the job before its client starts; the topology hook returns it.

    ``process_index`` of ``process_count`` processes, which meet at ``coordinator_address``
    (``host:port``) through ``distributed_client``, jaxlib's runtime client for it.
    ``local_device_count`` replaces the plugin's own count of this process's devices.
    ``aot_topology`` names a topology to compile for without any chip (``v5e:4x4``): the client's
    ``local_devices`` are then those of the topology and its buffers have no values.
    ``options`` are for use between one extension and one plugin.
    """

    process_index: int = 0
    process_count: int = 1
    coordinator_address: str | None = None
    distributed_client: object = None
    local_device_count: int | None = None
    aot_topology: str | None = None
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and numpy dtype of one program argument or result, and its HLO sharding if any.

    Over several devices the shape is that of the whole value. ``sharding`` None means, for an argument, the whole
    value on every device, and for a result whatever the compiler chooses (``Executable.output_shardings``).
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A lowered step, which a plugin compiles.

    ``name`` is the step's name in reports and profiles. ``inputs`` and ``outputs`` are shapes and dtypes in the
    order of the module's arguments and results. ``placement`` says which devices run it: ``num_replicas`` times
    ``num_partitions`` of them, where a partition has a part of each value and a replica has values of its own.
    ``stablehlo`` is MLIR bytecode in the StableHLO, CHLO and Shardy dialects; a plugin that hands it to another
    XLA than this process's jaxlib converts it to its version. ``aliases`` pairs an input with the output that
    may reuse its memory (donation), also recorded in the module itself. ``options`` are compiler options by the
    compiler's own names. ``largest`` is the number of elements of the largest value that the program computes or
    takes; None if it is not known, and for one stage of a step, which may run many times in each step. ``runs``
    is the number of programs that the step runs one after another, this one included: about how many times the
    step pays for a launch.
    """

    name: str
    stablehlo: bytes
    inputs: tuple[ArraySpec, ...]
    outputs: tuple[ArraySpec, ...]
    aliases: tuple[tuple[int, int], ...]
    placement: Placement
    num_replicas: int = 1
    num_partitions: int = 1
    options: Mapping[str, str | int | float | bool] = dataclasses.field(default_factory=dict)
    largest: int | None = None
    runs: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Loops:
    """Which repeats in a row, each on what the one before computed, become a loop; by default all with a product.

    A loop has at least ``min_trips`` iterations. It copies the parameters that its iterations read into stacks:
    at least half of their bytes must be of parameters that are gathered from ``min_gathered`` devices or more for
    each use, which makes the copies small beside the rest. What iterations leave for later, as for a backward
    pass, is written into stacks, too: without the gradients of parameters, it must have at most ``max_saved``
    times the bytes of what goes from one iteration to the next. An iteration has ``Outlining.min_operations`` or
    more, and a loop saves ``Outlining.min_saved``.
    """

    min_trips: int = 2
    min_gathered: int = 1
    max_saved: float = math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class Outlining:
    """Whether and how a device's compiler benefits from repeats that are lowered as functions.

    ``wanted`` is the default where the user says nothing (``XLA_OUTLINE_REPEATS``). A run of
    operations becomes a function if it has at least ``min_operations`` and if that leaves at least
    ``min_saved`` operations fewer to compile, all repeats counted. ``options`` are added to
    ``Program.options`` for programs with such functions. A step of at least ``min_staged`` operations
    is compiled as several programs that run in a row, so that a function is compiled once where the
    compiler would clone it (None: never), unless these would have fewer than ``min_stage`` operations
    on average: each costs a launch. If there would be more than ``most_stages`` stages, one stage contains
    several calls in a row (None: no such limit). ``never_inside`` names operators
    (``aten.convolution.default``) that this compiler makes slower inside a function than outside.

    ``loops`` says which repeats in a row become a loop instead (None: none; ``XLA_LOOP_REPEATS``). A step with a
    loop has no functions.
    """

    wanted: bool = False
    min_operations: int = 12
    min_saved: int = 40
    min_staged: int | None = None
    min_stage: int = 24
    most_stages: int | None = None
    never_inside: tuple[str, ...] = ()
    loops: Loops | None = None
    options: Mapping[str, str | int | float | bool] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """Copies between buffers and the tensors of another library in the memory of the same hardware.

    ``device`` is PyTorch's name of those tensors' device (``cuda``). ``take(array, placement)`` makes a buffer with
    the values of an object with ``__dlpack__``, which may be changed or freed once this returns. ``give(buffer)``
    is an object with ``__dlpack__`` that shows the buffer's memory: it is only read, and not after a run to which
    the buffer is donated. Either puts its work after what is pending on the other side. Where they cannot, ``take``
    raises BufferError and ``give`` makes an object whose ``__dlpack__`` does; values then go through the host.
    """

    device: str
    take: Callable[[object, Placement], Buffer]
    give: Callable[[Buffer], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties of a client, and its abilities in addition to the methods of ``DeviceClient``; by default none.

    ``shapes_only``: its buffers have shapes and no values (ahead-of-time compilation). ``outlining``: how its
    compiler gains from repeats. ``rehearse(executable) -> bool``: runs what ``deserialize`` gave once, on
    arguments of its own, because a first run sets things up, and says whether it did. It is called ahead of
    the first use, on another thread; a program that may act on the outside, not end, or take much memory or
    time is not to be run. ``unordered_scatter``: it adds values that go into one element in any order, so that two
    runs may differ: such operators are refused under ``torch.use_deterministic_algorithms(True)``.
    ``compiles_beside``: several threads may call ``compile`` at once, and others run programs meanwhile.
    ``tf32``: at XLA's default precision it multiplies float32 as TF32, so that PyTorch's switches for that decide
    the precision of products and convolutions. ``keep_tuning(folder, readonly)``: is told the folder of the
    persistent cache as soon as there is one; what its compiler finds out by measuring may be kept there, in a
    folder of its own. ``exchange``: copies to and from another library's tensors that never go through the host.
    """

    shapes_only: bool = False
    outlining: Outlining = Outlining()
    rehearse: Callable[[Executable], bool] | None = None
    unordered_scatter: bool = False
    compiles_beside: bool = False
    tf32: bool = False
    keep_tuning: Callable[[Path, bool], None] | None = None
    exchange: Exchange | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryInfo:
    """A device's memory in bytes.

    ``bytes_used`` are in use now, ``peak_bytes_used`` were at most since the process began, and ``bytes_limit``
    is what the device can give (None: not known).
    """

    bytes_used: int
    bytes_limit: int | None
    peak_bytes_used: int


@runtime_checkable
class Buffer(Protocol):
    """A value in device memory: opaque to the core, immutable, freed with its last reference.

    Takes weak references.
    """

    def is_ready(self) -> bool:
        """Whether the computation that makes this value has finished."""
        ...


@runtime_checkable
class Executable(Protocol):
    """A compiled program, loaded on the devices of its placement."""

    program_name: str

    def execute(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """Enqueue one run and return its results at once. Donated arguments cannot be used afterwards.

        Over several devices an argument is one logical ``Buffer`` with a shard on each, laid out as
        ``input_shardings`` says. Raises RuntimeError for a deleted argument or another layout or
        shape; what fails during the run is raised when a result is waited for or read.
        """
        ...

    def serialize(self) -> bytes:
        """The executable in a form that ``deserialize`` of an equal client loads.

        Raises NotImplementedError where the runtime has no such form.
        """
        ...

    def memory_analysis(self) -> Mapping[str, int]:
        """Bytes by use: ``arguments, outputs, temporaries, aliased, code``."""
        ...

    def cost_analysis(self) -> Mapping[str, float]:
        """The compiler's estimates (``flops``, ``bytes accessed``), empty where it offers none."""
        ...

    def optimized_hlo(self) -> str:
        """The compiled module as HLO text."""
        ...

    def input_shardings(self) -> tuple[str | None, ...]:
        """HLO sharding of each input as compiled; None: whole on every device."""
        ...

    def output_shardings(self) -> tuple[str | None, ...]:
        """HLO sharding of each output as compiled; None: whole on every device."""
        ...


class DeferredExecutable(Executable, Protocol):
    """An executable whose run and donations an interrupt (KeyboardInterrupt) cannot separate; optional."""

    def deferred(
        self, arguments: list[Buffer], results: list[Buffer], checked: bool = False
    ) -> Iterator[object]:
        """An iterator that does what ``execute`` does once it is exhausted, and extends ``results``.

        It runs no Python function (``map`` over functions of C). With ``checked`` the caller has
        checked the arguments; they are added to their list only when the run begins.
        """
        ...


class ReplicaExecutable(Executable, Protocol):
    """A program of replicas that takes and returns buffers of this process's own device; optional.

    Without it the core assembles global buffers for ``execute`` and takes this process's shard of each result.
    """

    def execute_own(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """``execute``, with this process's parts of the arguments and results."""
        ...

    def deferred_own(self, arguments: list[Buffer], results: list[Buffer]) -> Iterator[object]:
        """``DeferredExecutable.deferred``, with this process's parts."""
        ...


@runtime_checkable
class DeviceClient(Protocol):
    """One running plugin: devices, transfers, compilation."""

    interface_version: int
    device_type: str
    # Since version 2 it has ``capabilities: Capabilities``; ask ``capabilities_of``.

    def devices(self) -> Sequence[DeviceDescription]:
        """All devices of the job, in the order of their ids."""
        ...

    def local_devices(self) -> Sequence[DeviceDescription]:
        """The devices this process addresses; ``xla:N`` is the Nth."""
        ...

    def put(self, array: np.ndarray, placement: Placement) -> Buffer:
        """Copy a host array to the device; the array may be changed once this returns."""
        ...

    def get(self, buffer: Buffer) -> np.ndarray:
        """Wait for a value and copy it to the host; the array is the caller's own, and writable.

        Raises RuntimeError if its computation failed, if the buffer was donated, or if this process
        does not hold all of it.
        """
        ...

    def copy(self, buffer: Buffer, placement: Placement) -> Buffer:
        """A second buffer with the same value, on ``placement``; also on the same device."""
        ...

    def allocate(self, spec: ArraySpec, placement: Placement) -> Buffer:
        """A zero-filled buffer, made without a host array of that size where the device can."""
        ...

    def placement_of(self, buffer: Buffer) -> Placement:
        """Where a buffer lies: its devices, and its sharding if it is split over them."""
        ...

    def shards(self, buffer: Buffer) -> Sequence[tuple[int, Buffer]]:
        """The parts of a buffer that this process holds, uncopied: device id, one-device buffer."""
        ...

    def assemble(self, shards: Sequence[Buffer], spec: ArraySpec, placement: Placement) -> Buffer:
        """One logical buffer of this process's parts, without a copy.

        ``shards`` are the parts in the placement's device order, ``spec`` is the shape and dtype of the whole
        value. With ``placement.sharding`` None each part is a whole value of its own (data parallelism: the
        "replicated" values may differ). Raises ValueError when number or shapes do not fit.
        """
        ...

    def compile(self, program: Program) -> Executable:
        """Compile for the program's placement. Raises RuntimeError with the compiler's message."""
        ...

    def deserialize(self, payload: bytes, program_name: str, placement: Placement) -> Executable:
        """Load what ``Executable.serialize`` wrote into ``payload``; this runs code from there.

        ``program_name`` is the step's name, for reports; ``placement`` says which devices run the program, which
        need not be those that it was compiled for.
        Raises ValueError when it does not fit this client.
        """
        ...

    def wait(self, buffers: Sequence[Buffer]) -> None:
        """Block until every buffer is computed. Raises RuntimeError if one failed."""
        ...

    def fingerprint(self) -> Mapping[str, str]:
        """Everything that compiled code depends on in addition to the program: versions, target, flags.

        Equal on every process of a job and from run to run, so that a cache entry is found again.
        """
        ...

    def numpy_dtype(self, dtype: np.dtype) -> np.dtype:
        """The dtype in which this device keeps ``dtype`` (on a TPU, float32 for float64)."""
        ...

    def memory_info(self, local_index: int) -> MemoryInfo:
        """Memory figures of one addressable device."""
        ...

    def shutdown(self) -> None:
        """Release the devices; the client is not used afterwards."""
        ...


def capabilities_of(client: DeviceClient) -> Capabilities:
    """The capabilities of a client of any supported version; those of version 1 have them as attributes."""
    declared = getattr(client, "capabilities", None)
    if declared is not None:
        return declared  # type: ignore[no-any-return]
    return Capabilities(
        shapes_only=getattr(client, "shapes_only", False),
        outlining=getattr(client, "outlining", Outlining()),
        rehearse=getattr(client, "rehearse", None),
    )


class ClientFactory(Protocol):
    """What a plugin's entry point in the group ``xla_core.devices`` names.

    It may carry the attribute ``interface_version``, checked before it is called, and
    ``is_available(options) -> bool``, a cheap look (no client, no network) that decides whether
    this device is chosen when the user names none.
    ``launch_environments(options) -> list[dict[str, str]]`` says what a launcher of one process per
    device adds to the environment of each process of this host; without it there is one process.
    ``use_one_device()`` sets the environment so that this process is alone and has one device, for a launcher
    of one process; without it the environment stays as it is.
    ``job(options) -> Job | None`` is this process's place in a job that neither our variables nor torchrun's
    describe: that of a slice of several hosts, from what its machines are told.
    """

    def __call__(self, topology: Topology, options: Mapping[str, str]) -> DeviceClient:
        """Start the plugin; ``options`` is usually the process's environment."""
        ...
