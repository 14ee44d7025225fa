"""Every private or unstable name of jax and jaxlib that this project uses, in one place.

Each use names the versions it was run with. Nothing here changes jax's configuration or starts one
of jax's own backends: a user's jax in the same process does not notice that we exist.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

import jax
import jaxlib.version
import numpy as np

# jax 0.10.2: the flag of the tracing context that says how much of a traceback each op records.
from jax._src import config as _jax_config

# jax 0.10.2: ShapedArray is the aval type which jaxlib's transfer and result paths expect.
from jax._src import core as _jax_core

# jax 0.10.2: ShardingContext tells the lowering over how many partitions a program is laid out.
from jax._src import sharding_impls as _sharding_impls

# jax 0.10.2: read only by backends_started().
from jax._src import xla_bridge as _xla_bridge

# jax 0.10.2: the step from jaxpr to an MLIR module; the public way starts a backend on the way.
from jax._src.interpreters import mlir as _mlir

# jaxlib 0.10.2: the extension module with clients, executables and arrays.
from jaxlib import _jax as _jaxlib

# jaxlib 0.10.2: the profiler without the parts of jax.profiler that start a backend.
from jaxlib import _profiler
from jaxlib import xla_client as _xla_client

# jaxlib 0.10.2: MLIR bindings; ``ir`` edits attributes, ``passmanager`` strips locations.
from jaxlib.mlir import ir
from jaxlib.mlir import passmanager as _passmanager

# jaxlib 0.10.2: builders of StableHLO operations, for lowering rules that jax has no primitive for.
from jaxlib.mlir.dialects import stablehlo as stablehlo

from xla_core.jax_bridge import (
    manual_constants_pass,
    mlir_contexts,
    module_attributes,
    pallas_kernels,
    partitioner_repairs,
)
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

# jax 0.10.2: an operation of ours; public as jax.extend.core.Primitive, which takes 0.15 s to import
Primitive: TypeAlias = _jax_core.Primitive

# jaxlib 0.10.2: the host array is read before the call returns, so that the caller may change it.
_READ_DURING_CALL: Final = _xla_client.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
# The map among XLA's options that holds those which only one backend knows.
EXTRA_OPTIONS: Final = "xla_backend_extra_options"
STRIP_LOCATIONS: Final = "builtin.module(strip-debuginfo)"


MSG_DONATED: Final = (
    "the buffer of shape {shape} and dtype {dtype} was donated to a program, which has reused its "
    "memory; read it before that run, or compile the program without this alias"
)


# Platforms for which jax's lowering looks at nothing but the jaxpr.
_PLAIN: Final = ("cpu", "cuda", "rocm")

Relocation: TypeAlias = Callable[[str], "tuple[str, str, int] | None"]
"""From an operation's name to its new name, file and line; None leaves it as it is."""


class HasShape(Protocol):
    """Anything with a shape and a dtype: an ``ArraySpec``, a ``jax.ShapeDtypeStruct``, an array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        ...

    @property
    def dtype(self) -> Any:
        """A numpy dtype, or what ``numpy.dtype`` takes."""
        ...


# --- lowering -----------------------------------------------------------------------------------


def lower(
    function: Callable[..., Any],
    avals: Sequence[HasShape],
    aliases: Sequence[tuple[int, int]],
    platform: str,
    name: str,
    *,
    num_replicas: int = 1,
    num_partitions: int = 1,
    input_shardings: Sequence[str | None] = (),
    output_shardings: Sequence[str | None] = (),
    debug_locations: bool = False,
    kept_prefix: str | None = None,
    relocate: Relocation | None = None,
    edit: Callable[[ir.Module], None] | None = None,
) -> bytes:
    """Lower ``function`` of ``len(avals)`` arrays to StableHLO bytecode for one ``platform``.

    Every input stays an argument, used or not; outputs are the flattened result. ``aliases`` pairs
    an input with the output that takes over its memory. Shardings come one per input or output, or
    not at all; None means replicated for an input and the compiler's choice for an output. One is
    HLO text (``{devices=[2,1]<=[2]}``) or Shardy's (``#sdy.sharding<mesh<["x"=2]>, [{"x"}, {}]>``);
    a program uses one of the two forms. 64-bit types are on, whatever jax's configuration says, and
    no jax backend is started. Calls of inner functions (``jax.jit``) whose names begin with
    ``kept_prefix`` tell XLA to keep them as functions, each compiled once. Locations are left out
    unless ``debug_locations``, so that equal programs give equal bytes wherever they were traced.
    With ``relocate`` operations keep their names (of ``jax.named_scope``) as it changes them; ``edit``
    may change the module.
    Raises ValueError for an alias that does not fit, or if the function calls back into Python.
    """
    module = lower_to_module(
        function, avals, aliases, platform, name,
        num_replicas=num_replicas, num_partitions=num_partitions,
        input_shardings=input_shardings, output_shardings=output_shardings,
        debug_locations=debug_locations, kept_prefix=kept_prefix,
    )  # fmt: skip
    if edit is not None:
        edit(module)
    if relocate is not None:
        relocate_operations(module, relocate)
    return module_to_bytecode(module, debug_locations=debug_locations or relocate is not None)


def lower_to_module(
    function: Callable[..., Any],
    avals: Sequence[HasShape],
    aliases: Sequence[tuple[int, int]],
    platform: str,
    name: str,
    *,
    num_replicas: int = 1,
    num_partitions: int = 1,
    input_shardings: Sequence[str | None] = (),
    output_shardings: Sequence[str | None] = (),
    debug_locations: bool = False,
    kept_prefix: str | None = None,
) -> ir.Module:
    """``lower`` up to the MLIR module, for callers that edit it first."""
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    with jax.enable_x64(True), location_detail(debug_locations):
        jaxpr = jax.make_jaxpr(function)(*structs)
        module = jaxpr_to_module(jaxpr, platform, name, num_partitions)
    if kept_prefix is not None:
        module_attributes.keep_functions(module, lambda name: name.startswith(kept_prefix))
        with module.context:
            _passmanager.PassManager.parse("builtin.module(func.func(cse,canonicalize))").run(
                module.operation
            )
    module_attributes.set_module_counts(module, num_replicas, num_partitions)
    module_attributes.annotate(module, aliases, input_shardings, output_shardings)
    if num_partitions > 1:
        module_attributes.pin_unannotated_inputs(module)
        manual_constants_pass.separate_constants(module)
        partitioner_repairs.correct(module, num_partitions)
    if platform == "cpu" and num_partitions * num_replicas > 1:
        partitioner_repairs.lay_out_transforms(module)
    return module


def module_to_bytecode(module: ir.Module, *, debug_locations: bool = False) -> bytes:
    """The bytecode of an MLIR module, or of what ``jax.jit(f).lower()`` returned.

    Without ``debug_locations`` the module loses its locations: it is changed in place.
    """
    if hasattr(module, "compiler_ir"):
        module = module.compiler_ir("stablehlo")
    if not debug_locations:
        with module.context:
            _passmanager.PassManager.parse(STRIP_LOCATIONS).run(module.operation)
    output = io.BytesIO()
    module.operation.write_bytecode(file=output)
    mlir_contexts.count(output.tell())
    return output.getvalue()


def inline_functions(stablehlo: bytes, names: Collection[str]) -> bytes:
    """StableHLO bytecode whose kept functions (see ``lower``) of these names are inlined by XLA."""
    with _mlir.make_ir_context():  # jax 0.10.2
        module = ir.Module.parse(stablehlo)
        module_attributes.release_functions(module, names)
        return module_to_bytecode(module, debug_locations=True)


def operation_names(stablehlo: bytes) -> frozenset[str] | None:
    """The names of all operations in StableHLO bytecode, with their dialects; None if it is not readable."""
    with _mlir.make_ir_context():  # jax 0.10.2
        try:
            module = ir.Module.parse(stablehlo)
        except (ir.MLIRError, ValueError):
            return None
        operations = module_attributes.all_operations(module.body)
        return frozenset({"builtin.module", *(operation.name for operation in operations)})


def module_text(stablehlo: bytes) -> str:
    """StableHLO bytecode as readable MLIR."""
    # jax 0.10.2: a context in which all dialects that XLA accepts are loaded
    with _mlir.make_ir_context():
        return str(ir.Module.parse(stablehlo))


def hlo_text(stablehlo: bytes, tupled: bool = False) -> str:
    """StableHLO bytecode as the text of the HLO module that XLA makes of it, not optimised.

    ``tupled``: its results are one tuple, also where there is just one.
    """
    # jaxlib 0.10.2
    computation = _jaxlib.mlir.mlir_module_to_xla_computation(stablehlo, False, tupled)
    text: str = computation.get_hlo_module().to_string()
    return text


def jaxpr_function(jaxpr: Any) -> Callable[..., list[Any]]:
    """The function that computes what a closed jaxpr says."""
    # jax 0.10.2; public as jax.extend.core.jaxpr_as_fun
    return _jax_core.jaxpr_as_fun(jaxpr)  # type: ignore[no-any-return]


def trace_context() -> Any:
    """What of jax's configuration decides how a function is traced, hashable."""
    # jax 0.10.2
    return _jax_config.trace_context()


def backends_started() -> tuple[str, ...]:
    """Names of the backends that jax itself has started in this process (none because of us)."""
    return tuple(_xla_bridge._backends)


@contextlib.contextmanager
def location_detail(wanted: bool) -> Iterator[None]:
    """Whether operations that are traced inside keep where they come from."""
    # jax 0.10.2: collecting frames for locations that are stripped anyway costs time per op
    if wanted:
        yield
    else:
        with _jax_config.traceback_in_locations_limit(0):
            yield


def jaxpr_to_module(jaxpr: Any, platform: str, name: str, num_partitions: int) -> ir.Module:
    """The MLIR module of a jaxpr; symbolic sizes become its first arguments."""
    jaxpr = pallas_kernels.expanded(jaxpr)
    avals = list(jaxpr.in_avals)
    # jax 0.11.2 and 0.12.0 ask for the results' types, too.
    results = {"out_avals": list(jaxpr.out_avals)} if SINCE_0_11 else {}
    axes = _sharding_impls.ShardingContext(num_partitions)
    sizes = (n for aval in avals for n in getattr(aval, "shape", ()))
    plain = platform in _PLAIN and num_partitions == 1 and not jaxpr.effects
    if plain and all(type(n) is int for n in sizes):
        module, callbacks = mlir_contexts.lower_jaxpr(jaxpr, platform, name, axes, results)
    else:
        # jax 0.10.2: all arguments are keyword arguments without defaults.
        result = _mlir.lower_jaxpr_to_module(
            name,
            jaxpr,
            num_const_args=0,
            in_avals=avals,
            **results,
            ordered_effects=[],
            platforms=(platform,),
            # without one, the lowering of a kernel for TPUs would start jax's own client of the chips
            backend=pallas_kernels.Compiler(platform) if platform == "tpu" else None,
            axis_context=axes,
            donated_args=[False] * len(avals),
            num_partitions=num_partitions,
            lowering_parameters=_mlir.LoweringParameters(hoist_constants_as_args=False),
        )
        module, callbacks = result.module, result.host_callbacks
    if callbacks:
        raise ValueError(f"{name} calls back into Python; a program for a device cannot")
    return module


def relocate_operations(module: ir.Module, relocate: Relocation) -> None:
    """Give operations the names and lines that ``relocate`` makes of the names they have."""

    with module.context:
        for operation in module_attributes.all_operations(module.body):
            location = operation.location
            if isinstance(location, ir.NameLoc):
                placed = relocate(location.name_str)
                if placed is not None:
                    name, filename, line = placed
                    inner = ir.Location.file(filename, line, 0) if filename else None
                    operation.location = ir.Location.name(name, childLoc=inner)


# --- profiling ----------------------------------------------------------------------------------

Session: TypeAlias = _profiler.ProfilerSession


def profiler_session(*, python_frames: bool = False) -> Session:
    """Start to record what the runtimes and this process's threads do; no jax backend is started.

    Raises RuntimeError while another session records.
    """
    # jaxlib 0.10.2: jax.profiler.start_trace would start a backend of jax's own
    options = _profiler.ProfileOptions()
    options.python_tracer_level = int(python_frames)
    options.raise_error_on_start_failure = True
    return _profiler.ProfilerSession(options)


def profiler_export(session: Session, directory: str) -> None:
    """End a session and write it below ``directory`` as TensorBoard's profile plugin expects."""
    # jaxlib 0.10.2
    session.stop_and_export(directory)


def profiler_server(port: int) -> Any:
    """A server that records when asked over the network, while the returned object lives."""
    # jaxlib 0.10.2
    return _profiler.start_server(port)


def trace_me(name: str, **details: Any) -> Any:
    """A context manager whose time shows as ``name`` in profiles; nearly free when none is taken."""
    # jaxlib 0.10.2
    return _profiler.TraceMe(name, **details)


# --- clients ------------------------------------------------------------------------------------


def make_cpu_client(
    *,
    asynchronous: bool,
    num_devices: int,
    process_index: int = 0,
    process_count: int = 1,
    distributed_client: Any = None,
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


def single_device_sharding(device: Device) -> Any:
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
_shardings: dict[tuple[tuple[Device, ...], str], Any] = {}


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
    sharding: Any,
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


def result_handler(aval: _jax_core.ShapedArray, sharding: Any) -> Any:
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


def hlo_sharding_of(sharding: Any) -> HloSharding:
    """The HLO sharding that an executable reports for one input or output."""
    # jaxlib 0.10.2: executables report the protocol buffer form
    return sharding if hasattr(sharding, "is_replicated") else HloSharding.from_proto(sharding)
