"""GPUs as devices: a client of this machine's GPUs, and one of a topology to compile for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

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
"""The name under which jaxlib registers the library; jax uses the same."""
ALLOCATORS: Final = ("default", "bfc", "cuda_async", "platform", "vmm")

MSG_LIBRARIES: Final = (
    "NVIDIA's libraries do not fit jax's CUDA plugin: {error} Run: pip install 'jax[cuda{cuda}]=={jaxlib}', "
    "which installs all of them; LD_LIBRARY_PATH must not contain others"
)
MSG_NOT_LOADED: Final = "jax could not load its CUDA plugin {path}; the log says why"
MSG_NOT_STARTED: Final = (
    "the CUDA runtime could not open a GPU: {error}. Driver: {driver}; GPUs of this process: {gpus} "
    "(CUDA_VISIBLE_DEVICES). Check that nvidia-smi lists them; if another program uses their memory, set "
    "XLA_PYTHON_CLIENT_PREALLOCATE=0 or XLA_CLIENT_MEM_FRACTION"
)
MSG_ALLOCATOR: Final = "XLA_PYTHON_CLIENT_ALLOCATOR is {got!r}; set it to one of {known}"
MSG_FRACTION: Final = "{name} is {got!r}; set it to a part of the GPU's memory, above 0 and up to 1"
MSG_TWO_FRACTIONS: Final = (
    "XLA_CLIENT_MEM_FRACTION and {old}, its former name, are both set; unset {old}"
)
MSG_MEBIBYTES: Final = "{name} is {got!r}; set it to a whole number of MiB"


class Factory:
    """The plugin's entry point: creates a client, and answers the core's questions before that."""

    interface_version = INTERFACE_VERSION

    def __call__(
        self, topology: Topology, options: Mapping[str, str]
    ) -> DeviceClient | CudaTopologyClient:
        """Start a client of this process's GPUs, or one of ``XLA_AOT_TOPOLOGY``, which needs no GPU.

        ``options`` is usually the environment; the package's README lists the variables. Raises RuntimeError, which
        names what is missing or does not fit, and ValueError for an invalid setting.
        """
        aot_topology = topology.aot_topology or flags.AOT_TOPOLOGY.text(options)
        if aot_topology:
            reads = flags.AOT_READS.get(options).strip().lower()
            client: CudaTopologyClient = CudaTopologyClient(
                parse_topology(aot_topology), reads=reads
            )
            return client
        return CudaClient(topology, options)

    def is_available(self, options: Mapping[str, str]) -> bool:
        """Whether jax's plugin is installed, and a driver is there or a topology is set; loads nothing."""
        if installation.find_plugin() is None:
            return False
        return bool(flags.AOT_TOPOLOGY.text(options)) or installation.has_driver()

    def launch_environments(self, options: Mapping[str, str]) -> list[dict[str, str]]:
        """The variables that a launcher sets in each process of this host, so that each has one GPU."""
        gpus = installation.visible_gpus(options)
        return [{settings.VISIBLE_DEVICES.name: gpu} for gpu in gpus] or [{}]


create_client: Final = Factory()


class CudaClient(PjrtClient):
    """The GPUs that this process may use."""

    device_type = "CUDA"
    plugin = PLUGIN
    version = VERSION
    platform = "cuda"
    missing_device = ": CUDA_VISIBLE_DEVICES sets each process's GPUs"

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
        """The capabilities of GPUs, the folder of measurements, and copies from and to CUDA PyTorch."""
        exchange = Exchange("cuda", self.take_dlpack, lambda buffer: buffer)
        common = dataclasses.replace(
            super().capabilities, keep_tuning=self._tuning.keep, exchange=exchange
        )
        return of_gpus(common)

    def compile(self, program: Program) -> Executable:
        """Compile for the program's placement, and keep XLA's measurements; see ``PjrtClient.compile``."""
        return super().compile(self._tuning.added_to(program))

    def fingerprint(self) -> Mapping[str, str]:
        """The facts that compiled code depends on.

        Versions of plugin, jaxlib and CUDA, kinds of GPUs, XLA's flags.
        """
        kinds = sorted(
            {(d.kind, str(d.attributes.get("compute_capability"))) for d in self.devices()}
        )
        return {**super().fingerprint(), "kinds": repr(kinds), "xla_flags": flags.XLA_FLAGS.get()}


class CudaTopologyClient(TopologyClient):
    """A client that compiles for GPUs without having any.

    Without a GPU, XLA cannot measure kernels: it chooses the one that its model of the GPU predicts to be the
    fastest. That can be another program than on a host with GPUs, so this client's fingerprint differs.
    """

    device_type = "CUDA"
    plugin = PLUGIN
    platform = "cuda"

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of GPUs, whose buffers have no values here."""
        return of_gpus(super().capabilities)

    def __init__(self, topology: GpuTopology, *, reads: str = "error") -> None:
        plugin = installation.checked_plugin()
        gpu_runtime.load_gpu_compiler(_LIBRARY, str(plugin.library), plugin.kernels, "CUDA")
        devices = gpu_runtime.topology_devices(_LIBRARY, topology.name, topology.library_options())
        super().__init__(
            devices, topology=topology.name, reads=reads, memory_bytes=topology.kind.memory_bytes
        )

    def fingerprint(self) -> Mapping[str, str]:
        """The facts that compiled code depends on: versions, the topology, XLA's flags."""
        return {
            "plugin": f"{PLUGIN} {VERSION}",
            "jaxlib": gpu_runtime.JAXLIB_VERSION,
            "topology": f"without autotuning: {self.topology}",
            "xla_flags": flags.XLA_FLAGS.get(),
        }


def create_options(options: Mapping[str, str]) -> dict[str, str | int | float | bool | list[int]]:
    """The options with which the library creates a client. Raises ValueError for an invalid setting."""
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
    """Load the plugin and its kernels through jax. Raises RuntimeError, which says what does not fit."""
    if not gpu_runtime.library_loaded(_LIBRARY):
        try:
            gpu_runtime.check_cuda_libraries(plugin.module)
        except RuntimeError as error:
            text = MSG_LIBRARIES.format(
                error=error, cuda=plugin.cuda, jaxlib=gpu_runtime.JAXLIB_VERSION
            )
            raise RuntimeError(text) from error
        # through jax, which can then use the GPUs in this process too
        gpu_runtime.load_jax_plugins()
        if not gpu_runtime.library_loaded(_LIBRARY):
            raise RuntimeError(MSG_NOT_LOADED.format(path=plugin.library))
    gpu_runtime.initialize_library(_LIBRARY)
