"""The GPU as a device: a client of GPUs that are here, or of a topology to compile for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import xla_pjrt_cuda.installation as installation
import xla_pjrt_cuda.settings as settings
from xla_core.contract.device_protocol import (
    INTERFACE_VERSION,
    Capabilities,
    DeviceClient,
    Exchange,
    Executable,
    Program,
    Topology,
)
from xla_core.pjrt import gpu_runtime
from xla_core.pjrt.client import PjrtClient
from xla_core.pjrt.topology_client import TopologyClient
from xla_core.support import flags
from xla_pjrt_cuda.compiling import Tuning, of_gpus
from xla_pjrt_cuda.topology import GpuTopology, parse_topology

PLUGIN: Final = "xla-pjrt-cuda"
VERSION: Final = "0.1.0"
_LIBRARY: Final = "cuda"
"""The name under which jaxlib keeps the library; jax's own."""
ALLOCATORS: Final = ("default", "bfc", "cuda_async", "platform", "vmm")

MSG_LIBRARIES: Final = (
    "NVIDIA's libraries do not fit jax's CUDA plugin: {error} Run: pip install 'jax[cuda{cuda}]=={jaxlib}', "
    "which brings all of them; LD_LIBRARY_PATH must not name others"
)
MSG_NOT_LOADED: Final = "jax could not load its CUDA plugin {path}; the log says why"
MSG_NOT_STARTED: Final = (
    "the CUDA runtime could not open a GPU: {error}. Driver: {driver}; GPUs of this process: {gpus} "
    "(CUDA_VISIBLE_DEVICES). See that nvidia-smi lists them; where their memory is in use, set "
    "XLA_PYTHON_CLIENT_PREALLOCATE=0 or XLA_CLIENT_MEM_FRACTION"
)
MSG_ALLOCATOR: Final = "XLA_PYTHON_CLIENT_ALLOCATOR is {got!r}; set it to one of {known}"
MSG_FRACTION: Final = "{name} is {got!r}; set it to a part of the GPU's memory, above 0 and up to 1"
MSG_TWO_FRACTIONS: Final = (
    "XLA_CLIENT_MEM_FRACTION and {old}, its former name, are both set; unset {old}"
)
MSG_MEBIBYTES: Final = "{name} is {got!r}; set it to a whole number of MiB"


class Factory:
    """The plugin's entry point: callable, with what the core asks before it calls."""

    interface_version = INTERFACE_VERSION

    def __call__(self, topology: Topology, options: Mapping[str, str]) -> DeviceClient:
        """Start a client of this process's GPUs, or of ``XLA_AOT_TOPOLOGY`` without any.

        ``options`` is usually the environment; see the package's README for what is read. Raises
        RuntimeError that names what is missing or does not fit, ValueError for a setting that is none.
        """
        wanted = topology.aot_topology or flags.AOT_TOPOLOGY.text(options)
        if wanted:
            reads = flags.AOT_READS.get(options).strip().lower()
            client: Any = CudaTopologyClient(parse_topology(wanted), reads=reads)
            return client
        return CudaClient(topology, options)

    def is_available(self, options: Mapping[str, str]) -> bool:
        """Whether jax's plugin is installed and the driver (or a topology) is here; loads nothing."""
        if installation.find_plugin() is None:
            return False
        return bool(flags.AOT_TOPOLOGY.text(options)) or installation.has_driver()

    def launch_environments(self, options: Mapping[str, str]) -> list[dict[str, str]]:
        """What a launcher adds to the environment of each process of this host: one GPU each."""
        gpus = installation.visible_gpus(options)
        return [{settings.VISIBLE_DEVICES.name: gpu} for gpu in gpus] or [{}]


create_client: Final = Factory()


class CudaClient(PjrtClient):
    """The GPUs that this process may use."""

    device_type = "CUDA"
    plugin = PLUGIN
    version = VERSION
    platform = "cuda"
    missing_device = ": CUDA_VISIBLE_DEVICES sets which each process has"

    def __init__(self, topology: Topology, options: Mapping[str, str]) -> None:
        self._tuning = Tuning()
        created = create_options(options)
        plugin = installation.checked_plugin()
        installation.check_driver(plugin.cuda)
        _load(plugin)
        if topology.process_count > 1:
            created |= {"node_id": topology.process_index, "num_nodes": topology.process_count}
        try:
            client = gpu_runtime.make_client(_LIBRARY, created, topology.distributed_client)
        except RuntimeError as error:
            driver = installation.driver_version() or "of unknown version"
            gpus = ", ".join(installation.visible_gpus(options)) or "none"
            text = MSG_NOT_STARTED.format(error=error, driver=driver, gpus=gpus)
            raise RuntimeError(text) from error
        super().__init__(client, process_index=topology.process_index)

    @property
    def capabilities(self) -> Capabilities:
        """What GPUs are, the folder of measurements, and copies from and to CUDA PyTorch."""
        exchange = Exchange("cuda", self.take_dlpack, lambda buffer: buffer)
        common = dataclasses.replace(
            super().capabilities, keep_tuning=self._tuning.keep, exchange=exchange
        )
        return of_gpus(common)

    def compile(self, program: Program) -> Executable:
        """Compile for the program's placement; see ``PjrtClient.compile``. Measurements are kept."""
        return super().compile(self._tuning.added_to(program))

    def fingerprint(self) -> Mapping[str, str]:
        """Versions of plugin, jaxlib and CUDA, the kinds of the GPUs, XLA's flags."""
        kinds = sorted(
            {(d.kind, str(d.attributes.get("compute_capability"))) for d in self.devices()}
        )
        return {**super().fingerprint(), "kinds": repr(kinds), "xla_flags": flags.XLA_FLAGS.get()}


class CudaTopologyClient(TopologyClient):
    """GPUs to compile for, with XLA's compiler for them; none of them is needed.

    Without a GPU nothing is tuned by running it: where XLA would measure several kernels it takes the one
    that its model of the GPU likes best. That is another program than on a host with GPUs, which is why the
    fingerprint is another, too.
    """

    device_type = "CUDA"
    plugin = PLUGIN
    platform = "cuda"

    @property
    def capabilities(self) -> Capabilities:
        """What GPUs are, and that buffers have no values."""
        return of_gpus(super().capabilities)

    def __init__(self, topology: GpuTopology, *, reads: str = "error") -> None:
        plugin = installation.checked_plugin()
        gpu_runtime.load_gpu_compiler(_LIBRARY, str(plugin.library), plugin.kernels, "CUDA")
        devices = gpu_runtime.topology_devices(_LIBRARY, topology.name, topology.library_options())
        super().__init__(
            devices, topology=topology.name, reads=reads, memory_bytes=topology.kind.memory_bytes
        )

    def fingerprint(self) -> Mapping[str, str]:
        """Versions, the GPUs, XLA's flags."""
        return {
            "plugin": f"{PLUGIN} {VERSION}",
            "jaxlib": gpu_runtime.JAXLIB_VERSION,
            "topology": f"without autotuning: {self.topology}",
            "xla_flags": flags.XLA_FLAGS.get(),
        }


def create_options(options: Mapping[str, str]) -> dict[str, str | int | float | bool | list[int]]:
    """What the library's client is created with. Raises ValueError for a setting that is none."""
    allocator = settings.ALLOCATOR.get(options).lower()
    if allocator not in ALLOCATORS:
        raise ValueError(MSG_ALLOCATOR.format(got=allocator, known=", ".join(ALLOCATORS)))
    created: dict[str, str | int | float | bool | list[int]] = {
        "platform_name": "cuda",
        "allocator": allocator,
        "preallocate": settings.PREALLOCATE.get(options),
    }
    new, old = settings.MEM_FRACTION, settings.OLD_MEM_FRACTION
    if new.text(options) and old.text(options):
        raise ValueError(MSG_TWO_FRACTIONS.format(old=old.name))
    for flag in (new, old):
        if text := flag.text(options):
            created["memory_fraction"] = _fraction(flag.name, text)
    if text := settings.COLLECTIVE_MEMORY.text(options):
        if not text.isdecimal():
            raise ValueError(MSG_MEBIBYTES.format(name=settings.COLLECTIVE_MEMORY.name, got=text))
        created["collective_memory_size"] = int(text) << 20
    return created


def _fraction(name: str, text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0.0 < fraction <= 1.0:
        raise ValueError(MSG_FRACTION.format(name=name, got=text))
    return fraction


def _load(plugin: installation.Plugin) -> None:
    """Let jax load the plugin, with all that belongs to it. Raises RuntimeError that says what does not fit."""
    if not gpu_runtime.library_loaded(_LIBRARY):
        try:
            gpu_runtime.check_cuda_libraries(plugin.module)
        except RuntimeError as error:
            text = MSG_LIBRARIES.format(
                error=error, cuda=plugin.cuda, jaxlib=gpu_runtime.JAXLIB_VERSION
            )
            raise RuntimeError(text) from error
        # jax keeps what it loads: a jax in the same process works beside this
        gpu_runtime.load_jax_plugins()
        if not gpu_runtime.library_loaded(_LIBRARY):
            raise RuntimeError(MSG_NOT_LOADED.format(path=plugin.library))
    gpu_runtime.initialize_library(_LIBRARY)
