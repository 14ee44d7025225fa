"""Private or unstable names of jaxlib's runtime: clients, arrays and transfers, options of compilations.

Each use names the versions it was run with. Nothing here starts one of jax's own backends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import jax
import jaxlib.version
import numpy as np

# jax 0.10.2: ShapedArray is the aval type which jaxlib's transfer and result paths expect.
from jax._src import core as _jax_core

# jax 0.10.2: GSPMDSharding holds a plain HLO sharding.
from jax._src import sharding_impls as _sharding_impls

# jaxlib 0.10.2: the extension module with clients, executables and arrays.
from jaxlib import _jax as _jaxlib
from jaxlib import xla_client as _xla_client

from xla_core.jax_bridge.jax_versions import HOST_VIEWS_STAY, SINCE_0_11
from xla_core.support import caches
from xla_core.support.protobuf_wire import bytes_field

JAXLIB_VERSION: Final[str] = jaxlib.version.__version__

# jaxlib 0.10.2: the types of the runtime that device plugins handle
Array: TypeAlias = _xla_client.ArrayImpl
Client: TypeAlias = _xla_client.Client
CompileOptions: TypeAlias = _xla_client.CompileOptions
Device: TypeAlias = _xla_client.Device
DeviceAssignment: TypeAlias = _xla_client.DeviceAssignment
DeviceList: TypeAlias = _xla_client.DeviceList
HloSharding: TypeAlias = _xla_client.HloSharding
LoadedExecutable: TypeAlias = _xla_client.LoadedExecutable

# jaxlib 0.10.2: the host array is read before the call returns, so that the caller may change it.
_READ_DURING_CALL: Final = _xla_client.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
# The map among XLA's options that holds those which only one backend knows.
EXTRA_OPTIONS: Final = "xla_backend_extra_options"

MSG_DONATED: Final = (
    "the buffer of shape {shape} and dtype {dtype} was donated to a program, which has reused its "
    "memory; read it before that run, or compile the program without this alias"
)


# --- clients ------------------------------------------------------------------------------------


def make_cpu_client(
    *,
    asynchronous: bool,
    num_devices: int,
    process_index: int = 0,
    process_count: int = 1,
    distributed_client: object = None,
) -> Client:
    """A CPU client of our own, besides the one jax may start; gloo joins several processes."""
    collectives = None
    if distributed_client is not None:
        # jaxlib 0.10.2
        collectives = _jaxlib.make_gloo_tcp_collectives(distributed_client=distributed_client)
    # jaxlib 0.10.2
    return _xla_client.make_cpu_client(
        asynchronous=asynchronous,
        num_devices=num_devices,
        node_id=process_index,
        num_nodes=process_count,
        distributed_client=distributed_client,
        collectives=collectives,
    )


def prepare_cpu_kernels() -> None:
    """Load the LAPACK kernels that compiled CPU programs call by name.

    Lowering a linear algebra operator does this on the way; an executable from a cache needs it
    done before its first run.
    """
    # jaxlib 0.10.2: importing registers the targets with every CPU client, initialize() loads them
    from jax._src.lax import linalg  # noqa: F401  (heavy; needed by few programs)
    from jaxlib import lapack

    lapack._lapack.initialize()


# --- several processes --------------------------------------------------------------------------


def coordination_client(address: str, index: int, start_within: int, dead_after: int) -> Any:
    """A client of process ``index`` for that service; ``connect()`` it."""
    # jaxlib 0.10.2: what a Python missed_heartbeat_callback gets has no conversion to Python
    return _jaxlib.get_distributed_runtime_client(
        address,
        index,
        init_timeout=start_within,
        shutdown_timeout=start_within,
        heartbeat_timeout=dead_after,
        shutdown_on_destruction=False,
        use_compression=True,
    )


# --- arrays -------------------------------------------------------------------------------------


@caches.memoized("avals of arrays")
def shaped_array(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """The aval of an array; kept, as making one costs more than a transfer."""
    # jax 0.10.2: keeps a 64-bit dtype whether or not jax's own configuration allows it
    return _jax_core.ShapedArray(shape, dtype)


def single_device_sharding(device: Device) -> object:
    """The sharding of a whole value on one device."""
    return jax.sharding.SingleDeviceSharding(device)


def hlo_sharding(text: str | None) -> HloSharding:
    """An HLO sharding from its text form; None is replicated. Raises ValueError if malformed."""
    if text is None:
        return HloSharding.replicate()
    try:
        # jaxlib 0.10.2
        return HloSharding.from_string(text)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{text!r} is not an HLO sharding such as '{{devices=[2,1]<=[2]}}'"
        ) from error


# by devices and HLO text; a client that ends removes its own
_shardings: dict[tuple[tuple[Device, ...], str], object] = {}


def sharding_over(devices: Sequence[Device], sharding: HloSharding) -> Any:
    """``sharding`` laid over ``devices`` in that order, as arrays carry it.

    Equal arguments give the same object, so that equal layouts can be told by identity.
    """
    key = (tuple(devices), repr(sharding))
    gspmd = _shardings.get(key)
    if gspmd is None:
        # jax 0.10.2: the sharding class that holds a plain HLO sharding
        gspmd = _sharding_impls.GSPMDSharding(DeviceList(tuple(devices)), sharding)
        _shardings[key] = gspmd
    return gspmd


def forget_shardings(devices: Sequence[Device]) -> None:
    """Let go of what ``sharding_over`` keeps for these devices, when their client ends."""
    ended = set(devices)
    for key in [key for key in _shardings if not ended.isdisjoint(key[0])]:
        del _shardings[key]


def device_put(
    aval: _jax_core.ShapedArray,
    sharding: object,
    shards: Sequence[np.ndarray],
    devices: Sequence[Device],
) -> Array:
    """Copy one host array per addressable device, before returning, into one logical array."""
    # jaxlib 0.10.2: enable_x64 is an argument, so jax's configuration is not consulted
    return _xla_client.batched_device_put(
        aval, sharding, shards, devices, True, True, _READ_DURING_CALL, True
    )


def hardware_id(device: Device) -> int:
    """The number that other libraries in this process have for a device."""
    # jaxlib 0.10.2: none on the CPU
    return device.local_hardware_id or 0


def assemble(aval: _jax_core.ShapedArray, sharding: Any, shards: Sequence[Array]) -> Array:
    """One logical array of single-device arrays, in the order of the addressable devices."""
    # jaxlib 0.10.2: _skip_checks, as jax would compare values' types with its own configuration
    return Array(aval, sharding, list(shards), committed=True, _skip_checks=True)


def single_device_arrays(array: Array) -> list[Array]:
    """The addressable pieces of an array without copying; the array itself if there is one.

    Raises RuntimeError if the array was donated.
    """
    # jax 0.10.2: None once the memory is gone
    pieces = array._arrays
    if pieces is None:
        raise RuntimeError(MSG_DONATED.format(shape=array.shape, dtype=array.dtype))
    return pieces


def address_of(array: Array) -> int:
    """Where a single-device array's memory begins, without waiting; its id if the runtime does not say."""
    try:
        # jaxlib 0.10.2
        return array.unsafe_buffer_pointer()  # type: ignore[no-any-return]
    except RuntimeError:
        return id(array)


def to_host(array: Array) -> np.ndarray:
    """Wait for a single-device array and copy it to fresh, writable host memory."""
    # jaxlib 0.10.2: does not keep the host copy in the array as numpy.asarray would. A view of
    # the device memory must not leave: it would keep the buffer from being donated.
    if HOST_VIEWS_STAY and array.dtype.isbuiltin == 1 and array.platform() == "cpu":
        # jaxlib 0.11.2: a view by DLPack ends when it is dropped. NumPy has none of ml_dtypes' types: an array
        # of those is copied, not donated, after it was read.
        array.block_until_ready()  # raises what its computation failed with
        return np.array(np.from_dlpack(array), order="C", copy=True)
    host, copied = array._single_device_array_to_np_array_did_copy()
    return host if copied and host.flags.writeable else np.array(host, order="C", copy=True)


def result_handler(aval: _jax_core.ShapedArray, sharding: object) -> object:
    """What turns one output of an executable into an array of known type; see ``run``."""
    # jaxlib 0.10.2: committed, checks skipped; 0.11.2 and 0.12.0 never check
    flags = (True,) if SINCE_0_11 else (True, True)
    return _jaxlib.array_result_handler(aval, sharding, *flags)


def block_until_ready(arrays: Sequence[Array]) -> None:
    """Wait for every array; raises what the first failed one failed with."""
    # jaxlib 0.10.2
    _jaxlib.batched_block_until_ready(arrays)


# --- compilation --------------------------------------------------------------------------------


def compile_options(
    device_ids: np.ndarray,
    overrides: Mapping[str, str | int | float | bool],
    *,
    num_inputs: int,
    shardy: bool,
    portable: bool = False,
) -> CompileOptions:
    """Options for a program over ``device_ids`` (replicas x partitions), IEEE arithmetic.

    ``overrides`` are XLA's own option names; an unknown one makes the compilation fail. The value
    of ``xla_backend_extra_options`` is a comma-separated list of ``name`` or ``name=value``, the
    names being the backend's; there, XLA ignores what it does not know.
    """
    # jaxlib 0.10.2: all names below
    overrides = dict(overrides)
    extra = str(overrides.pop(EXTRA_OPTIONS, ""))
    options = CompileOptions()
    options.num_replicas, options.num_partitions = device_ids.shape
    options.device_assignment = DeviceAssignment.create(device_ids)
    options.compile_portable_executable = portable
    # -1: no profile-guided compilation, and no search for a profile
    options.profile_version = -1
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = device_ids.shape
    build.device_assignment = options.device_assignment
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = shardy
    if device_ids.shape[1] > 1:
        # arguments come as the program declares them; results may be as the partitioner likes
        build.allow_spmd_sharding_propagation_to_parameters = [False] * num_inputs
        build.allow_spmd_sharding_propagation_to_output = [True]
    build.debug_options.xla_cpu_enable_fast_math = False
    build.debug_options.xla_gpu_enable_fast_min_max = False
    options.env_option_overrides = list(overrides.items())
    return _with_extra_options(options, extra) if extra else options


def _with_extra_options(options: CompileOptions, extra: str) -> CompileOptions:
    """``options`` with entries added to the map of the backend's own options.

    The map has no setter, so the entries are appended in serialized form: protocol buffers merge
    what is parsed twice (https://protobuf.dev/programming-guides/encoding/#last-one-wins).
    """
    patch = b""
    for item in extra.split(","):
        name, _, value = item.partition("=")
        entry = bytes_field(1, name.encode()) + bytes_field(2, value.encode())
        # jaxlib 0.10.2: CompileOptionsProto.executable_build_options, .debug_options,
        # .xla_backend_extra_options
        patch += bytes_field(3, bytes_field(3, bytes_field(500, entry)))
    return CompileOptions.ParseFromString(options.SerializeAsString() + patch)


def hlo_sharding_of(sharding: object) -> HloSharding:
    """The HLO sharding that an executable reports for one input or output."""
    # jaxlib 0.10.2: executables report the protocol buffer form
    return sharding if hasattr(sharding, "is_replicated") else HloSharding.from_proto(sharding)
