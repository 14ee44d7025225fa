"""jaxlib's private names for PJRT C API libraries: loading one, its clients, its topologies.

The rest of what this project uses of jax and jaxlib is in ``jax_private``.
"""

from __future__ import annotations

import functools
import importlib
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

# jax 0.10.2: into how many parts an HLO sharding cuts each dimension
from jax._src import op_shardings as _op_shardings

# jax 0.10.2: loads the plugins that are installed for jax
from jax._src import xla_bridge as _xla_bridge

# jax 0.10.2: a context in which all dialects that XLA accepts are loaded
from jax._src.interpreters import mlir as _mlir
from jaxlib import _jax as _jaxlib

# jaxlib 0.10.2: the registry of loaded libraries, clients and topologies.
from jaxlib import xla_client as _xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as _stablehlo

from xla_core.jax_bridge.jaxlib_runtime import JAXLIB_VERSION as JAXLIB_VERSION
from xla_core.jax_bridge.jaxlib_runtime import Client, CompileOptions, Device, DeviceList
from xla_core.support import caches

# jaxlib 0.10.2: a compiled program that is not loaded on any device.
CompiledProgram: TypeAlias = _xla_client.Executable
CreateOptions: TypeAlias = Mapping[str, str | int | float | bool | list[int]]

MSG_STABLEHLO: Final = (
    "the PJRT library speaks {theirs}, and jaxlib {jaxlib} writes StableHLO {oldest} to {newest}: "
    "install {way}{reason}"
)

_UNIMPLEMENTED: Final = "UNIMPLEMENTED"
_OUT_OF_MEMORY: Final = "RESOURCE_EXHAUSTED"
_NOT_FOUND: Final = "NOT_FOUND"
# jaxlib 0.10.2 to 0.12
_NO_OPTION: Final = re.compile(r"No such compile option: '(\w+)'")
# What a library or jaxlib says of programs in a version that it does not know.
_OF_VERSIONS: Final = re.compile(
    r"StableHLO_v|\bvhlo\b|portable artifact|StableHLO version", re.IGNORECASE
)
_lock = threading.Lock()


def load_library(name: str, path: str) -> None:
    """Load the PJRT C API library at ``path`` under ``name``, once in this process.

    The registry is jaxlib's, one per process: what jax has loaded under the same name is used.
    Raises RuntimeError when the file is no such library or its API version does not fit jaxlib's.
    """
    with _lock:
        # jaxlib 0.10.2: all names below
        if not _xla_client.pjrt_plugin_loaded(name):
            _xla_client.load_pjrt_plugin_dynamically(name, path)
        initialize_library(name)


def initialize_library(name: str) -> None:
    """Let a loaded library set itself up, once."""
    # jaxlib 0.10.2: both names
    if not _xla_client.pjrt_plugin_initialized(name):
        _xla_client.initialize_pjrt_plugin(name)


def load_jax_plugins() -> None:
    """Let jax load the plugins that are installed for it, as it does before its first computation.

    No backend is started. A plugin that fails leaves an error in the log, as with jax alone.
    """
    # jax 0.10.2: does its work only at the first call
    _xla_bridge._discover_and_register_pjrt_plugins()


def library_loaded(name: str) -> bool:
    """Whether a library is loaded under ``name``, by us or by jax."""
    # jaxlib 0.10.2
    return bool(_xla_client.pjrt_plugin_loaded(name))


def load_gpu_compiler(name: str, path: str, kernels: str, platform: str) -> None:
    """Load a GPU's library without asking for a GPU, with the kernels that its programs call by name.

    ``kernels`` is the package of jax that has them, ``platform`` the library's own name of its platform.
    What is loaded already, by us or by jax, is used. Raises RuntimeError as ``load_library`` does.
    """
    with _lock:
        if not library_loaded(name):
            # jaxlib 0.10.2: all names below; what jax's own loading does, which refuses to without a GPU
            api = _xla_client.load_pjrt_plugin_dynamically(name, path)
            handlers = importlib.import_module(f"{kernels}.cuda_plugin_extension")
            _xla_client.register_custom_type_handler(
                platform, functools.partial(handlers.register_custom_type, api)
            )
            _xla_client.register_custom_call_handler(
                platform, functools.partial(handlers.register_custom_call_target, api)
            )
            for each, value in handlers.ffi_types().items():
                _xla_client.register_custom_type(each, value, platform=platform)
            for each, value in handlers.ffi_handlers().items():
                _xla_client.register_custom_call_target(
                    each, value, platform=platform, api_version=1
                )
        initialize_library(name)


def check_cuda_libraries(plugin: str) -> None:
    """Load NVIDIA's libraries as jax's module ``plugin`` does.

    Raises RuntimeError that names the one which is missing or too old.
    """
    module = importlib.import_module(f"jax_plugins.{plugin}")
    # jax-cuda13-pjrt 0.10.2: all three names; jax itself writes what they raise to the log
    module._load_nvidia_libraries()
    module._import_extensions()
    if module.cuda_versions is not None:
        module._check_cuda_versions(raise_on_first_error=True)


def make_client(name: str, options: CreateOptions, distributed_client: object = None) -> Client:
    """A client of a loaded library. Raises RuntimeError with the library's message."""
    # jaxlib 0.10.2
    return _xla_client.make_c_api_client(name, dict(options), distributed_client)


def stablehlo_misfit(client: object, error: Exception | None = None) -> str | None:
    """Why programs and a client's library do not fit, with both versions of StableHLO; None: they do.

    ``error`` is what the client raised for a program; without one the versions are compared that the library
    tells. A library that tells none is trusted until it raises.
    """
    # jaxlib 0.10.2: attributes of the library, as three numbers each
    theirs = getattr(client, "stablehlo_current_version", None)
    least = getattr(client, "stablehlo_minimum_version", None)
    # jaxlib 0.10.2: both names
    oldest, newest = _stablehlo.get_minimum_version(), _stablehlo.get_current_version()
    too_old = theirs is not None and tuple(theirs) < _numbers(oldest)
    too_new = least is not None and tuple(least) > _numbers(newest)
    if not (too_old or too_new) and (error is None or not _OF_VERSIONS.search(str(error))):
        return None
    spoken = "StableHLO of a version that it does not tell"
    if theirs is not None:
        since = "up to" if least is None else f"{_dotted(least)} to"
        spoken = f"StableHLO {since} {_dotted(theirs)}"
    if too_new:
        way = "a newer jaxlib, or an older library"
    elif too_old or theirs is None or tuple(theirs) < _numbers(newest):
        way = "a newer library, or an older jaxlib"
    else:
        way = "a library and a jaxlib of the same time"
    reason = f". It said: {error}" if error is not None else ""
    return MSG_STABLEHLO.format(
        theirs=spoken, jaxlib=JAXLIB_VERSION, oldest=oldest, newest=newest, way=way, reason=reason
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def topology_devices(name: str, topology: str, options: CreateOptions) -> list[Device]:
    """The devices of a topology that a loaded library can compile for; no hardware is needed.

    Raises RuntimeError with the library's message when it does not know the topology.
    """
    # jaxlib 0.10.2: what jax.experimental.topologies calls, for any library's name
    description = _xla_client._xla.get_default_c_api_topology(name, topology, dict(options))
    return list(description._make_compile_only_devices())


def compile_for_topology(
    devices: Sequence[Device], stablehlo: bytes, options: CompileOptions
) -> CompiledProgram:
    """Compile for ``devices`` of a topology. Raises RuntimeError with the compiler's message."""
    with _mlir.make_ir_context():
        try:
            module = ir.Module.parse(stablehlo)
        except ir.MLIRError as error:
            raise RuntimeError(f"this is no StableHLO: {error}") from error
        # jaxlib 0.10.2: takes a module where clients with hardware take bytecode
        return devices[0].client.compile(module, DeviceList(tuple(devices)), options)


def copy_to_devices(array: object, sharding: object, devices: Sequence[Device]) -> Any:
    """A copy of ``array`` laid out as ``sharding``, made by the runtime without the host."""
    # jaxlib 0.10.2
    (copied,) = _xla_client.batched_copy_array_to_devices_with_sharding(
        [array],
        [DeviceList(tuple(devices))],
        [sharding],
        [_xla_client.ArrayCopySemantics.ALWAYS_COPY],
    )
    return copied


def devices_and_sharding(sharding: Any) -> tuple[tuple[int, ...], str | None]:
    """Ids of an array's devices in order, and its HLO sharding's text; None where it is whole."""
    # jax 0.10.2: both names; the order is that in which shards lie
    ids = tuple(device.id for device in sharding._device_assignment)
    hlo = sharding._to_xla_hlo_sharding(1)
    return ids, None if hlo.is_replicated() else repr(hlo)


@caches.memoized("padded shapes of shards")
def padded_shape(sharding: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """``shape`` with each dimension at the next size that ``sharding`` cuts into equal parts.

    That is how the runtime keeps a value of a size that does not divide: XLA's partitioner lays the
    elements out from the front, and never reads what follows them.
    """
    # jax 0.10.2: both names; whole dimensions may be left out at the end, or all of them
    parts, _ = _op_shardings.get_num_ways_dim_sharded(sharding._to_xla_hlo_sharding(len(shape)))
    parts = [*parts, *[1] * (len(shape) - len(parts))]
    return tuple(-(-n // count) * count for n, count in zip(shape, parts, strict=True))


def from_dlpack(array: Any, device: Device) -> Any:
    """A buffer that shows the memory of an object with ``__dlpack__``, which is on ``device``.

    What the object's owner has in hand comes first. Raises BufferError where the runtime does not take it.
    """
    try:
        # jaxlib 0.10.2: an error on devices without streams
        stream = device.get_stream_for_external_ready_events()
    except RuntimeError as error:
        if not is_unimplemented(error):
            raise
        stream = None
    try:
        capsule = array.__dlpack__(stream=stream)
        # jaxlib 0.10.2
        return _jaxlib.dlpack_managed_tensor_to_buffer(capsule, device, stream)
    except (RuntimeError, TypeError, ValueError) as error:
        raise BufferError(str(error)) from error


def memory_stats(device: Device) -> Mapping[str, int] | None:
    """The allocator's figures (``bytes_in_use``, ``bytes_limit``, ...); None where it keeps none."""
    try:
        # jaxlib 0.10.2: None on the CPU, an error from libraries without the call
        return device.memory_stats()
    except RuntimeError as error:
        if is_unimplemented(error):
            return None
        raise


def device_attributes(device: Device) -> dict[str, object]:
    """What the runtime tells of a device beyond its number (``coords``, ``core_on_chip``, ...)."""
    # jaxlib 0.10.2: attributes of the library's own, found by name
    names = ("coords", "core_on_chip", "num_cores", "slice_index", "compute_capability")
    values = {name: getattr(device, name, None) for name in names}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if value is not None
    }


def is_unimplemented(error: Exception) -> bool:
    """Whether a runtime error says that the library lacks the function."""
    return str(error).startswith(_UNIMPLEMENTED)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a runtime or a compiler says that memory does not suffice."""
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY in str(error)


def is_not_found(error: Exception) -> bool:
    """Whether the coordination service says that nothing is kept under a key."""
    return _NOT_FOUND in str(error)


def unknown_option(error: Exception) -> str:
    """The option for whose name XLA refuses a program; empty for another error."""
    match = _NO_OPTION.search(str(error))
    return match[1] if match else ""
