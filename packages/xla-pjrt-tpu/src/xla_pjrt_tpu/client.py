"""TPUs as devices: a client of this host's chips, and one of a topology to compile for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

import xla_pjrt_tpu.chips as chips_of_host
import xla_pjrt_tpu.libtpu as libtpu
import xla_pjrt_tpu.processes as processes
import xla_pjrt_tpu.settings as settings
import xla_pjrt_tpu.slice_job as slice_job
from xla_core.contract.device_protocol import (
    INTERFACE_VERSION,
    DeviceClient,
    DeviceDescription,
    Loops,
    Outlining,
    Topology,
)
from xla_core.contract.job import Job
from xla_core.pjrt import runtime_library
from xla_core.pjrt.client import PjrtClient
from xla_core.pjrt.topology_client import TopologyClient
from xla_core.support import flags
from xla_pjrt_tpu.topology import TpuTopology, parse_topology

PLUGIN: Final = "xla-pjrt-tpu"
VERSION: Final = "0.1.0"

MSG_NO_TPU: Final = (
    "there is no TPU on this machine. libtpu: {library}. Found: {found}. On a machine without a TPU "
    "set XLA_AOT_TOPOLOGY (for example v5e:2x2) to compile for one, or PJRT_DEVICE=CPU to compute"
)
MSG_NOT_STARTED: Final = (
    "libtpu could not open the TPU: {error}. Found: {found}. Another process may hold it (a TPU chip "
    "belongs to one process at a time), or TPU_VISIBLE_CHIPS and TPU_PROCESS_BOUNDS may not fit "
    "this host"
)

MSG_TWO_DEVICES: Final = (
    "a chip of this TPU is two devices, and a process of launch() or spawn() uses one: the other would stay idle. "
    "Use SPMD: call xr.use_spmd() and the function directly"
)

_F64: Final = np.dtype(np.float64)
_C128: Final = np.dtype(np.complex128)
_REPLACED: Final[Mapping[np.dtype, np.dtype]] = {
    _F64: np.dtype(np.float32),
    _C128: np.dtype(np.complex64),
}


class Factory:
    """The plugin's entry point: creates a client, and answers the core's questions before that."""

    interface_version = INTERFACE_VERSION

    def __call__(
        self, topology: Topology, options: Mapping[str, str]
    ) -> DeviceClient | TpuTopologyClient:
        """Start a client of this host's chips, or one of ``XLA_AOT_TOPOLOGY``, which needs no chip.

        ``options`` is usually the environment; the package's README lists the variables. Raises RuntimeError if
        there is no TPU, which says what was found, and ValueError for a topology that does not exist.
        """
        aot_topology = topology.aot_topology or flags.AOT_TOPOLOGY.text(options)
        if aot_topology:
            reads = flags.AOT_READS.get(options).strip().lower()
            parsed = parse_topology(aot_topology, options)
            client: TpuTopologyClient = TpuTopologyClient(parsed, options, reads=reads)
            return client
        return TpuClient(topology, options)

    def is_available(self, options: Mapping[str, str]) -> bool:
        """Whether libtpu is installed, and there is a chip or a topology is set; does not use the network."""
        if libtpu.find_library(options) is None:
            return False
        return bool(flags.AOT_TOPOLOGY.text(options) or chips_of_host.find_chips().count)

    def launch_environments(self, options: Mapping[str, str]) -> list[dict[str, str]]:
        """The variables that a launcher sets in each process of this host, so that each has one chip.

        Raises RuntimeError if the slice is unknown, and NotImplementedError for chips that are two devices.
        """
        count = 0 if flags.AOT_TOPOLOGY.text(options) else processes.num_local_processes()
        if count and processes.num_logical_cores_per_chip() > 1:
            raise NotImplementedError(MSG_TWO_DEVICES)
        return [processes.topology_variables(rank, count) for rank in range(count)] or [{}]

    def use_one_device(self) -> None:
        """Set the environment so that this process uses the host's first chip, by itself."""
        if not flags.AOT_TOPOLOGY.get():
            processes.configure_one_chip_topology()

    def job(self, options: Mapping[str, str]) -> Job | None:
        """This process's place in the job of its slice: ``slice_job.job``."""
        return slice_job.job(options)


create_client: Final = Factory()


def _numpy_dtype(dtype: np.dtype) -> np.dtype:
    return _REPLACED.get(dtype, dtype)


def _fingerprint(
    platform_version: str, devices: Sequence[DeviceDescription], libtpu_flags: str
) -> dict[str, str]:
    """The facts that compiled code depends on, which are equal for chips and for their topology."""
    ids = sorted(devices, key=lambda d: d.id)
    places = [
        (d.id, d.kind, d.attributes.get("coords"), d.attributes.get("core_on_chip", 0)) for d in ids
    ]
    return {
        "plugin": f"{PLUGIN} {VERSION}",
        "jaxlib": runtime_library.JAXLIB_VERSION,
        "platform_version": platform_version,
        "devices": repr(places),
        "libtpu_flags": libtpu_flags,
        "xla_flags": flags.XLA_FLAGS.get(),
    }


# docs/repeats.md has the measurements.
OUTLINING: Final = Outlining(loops=Loops(min_trips=12, min_gathered=8, max_saved=2.0))


class TpuClient(PjrtClient):
    """The TPU chips that this process may use."""

    device_type = "TPU"
    outlining = OUTLINING
    plugin = PLUGIN
    version = VERSION
    platform = "tpu"
    missing_device = ": TPU_VISIBLE_CHIPS and TPU_PROCESS_BOUNDS set each process's chips"

    def __init__(self, topology: Topology, options: Mapping[str, str]) -> None:
        chips = chips_of_host.find_chips()
        described = chips_of_host.describe(options, chips)
        if not chips.count and not chips.nodes:
            path = libtpu.find_library(options)
            library = f"{path} (version {libtpu.package_version()})" if path else "not installed"
            raise RuntimeError(MSG_NO_TPU.format(library=library, found=described))
        version = chips_of_host.version_name(options, chips)
        with libtpu.environment(slice_job.chip_of_torchrun(options)):
            self._flags = libtpu.load(options, chips=True, megacore=version == "v4")
            try:
                client = runtime_library.make_client(
                    libtpu.LIBRARY, create_options(options), topology.distributed_client
                )
            except RuntimeError as error:
                raise RuntimeError(MSG_NOT_STARTED.format(error=error, found=described)) from error
        super().__init__(client, process_index=client.process_index())

    def fingerprint(self) -> Mapping[str, str]:
        """The facts that compiled code depends on: versions, chips and their coordinates, flags."""
        return _fingerprint(self.platform_version, self.devices(), self._flags)

    def numpy_dtype(self, dtype: np.dtype) -> np.dtype:
        """The dtype in which a TPU computes ``dtype``: float32 for float64, complex64 for complex128."""
        return _numpy_dtype(dtype)


class TpuTopologyClient(TopologyClient):
    """A client that compiles for TPU chips with libtpu's compiler, without having any."""

    device_type = "TPU"
    outlining = OUTLINING
    plugin = PLUGIN
    platform = "tpu"

    def __init__(
        self, topology: TpuTopology, options: Mapping[str, str], *, reads: str = "error"
    ) -> None:
        self._flags = libtpu.load(options, chips=False)
        try:
            devices = runtime_library.topology_devices(
                libtpu.LIBRARY, topology.library_name, topology.library_options()
            )
        except RuntimeError as error:
            raise ValueError(f"libtpu has no topology {topology.name}: {error}") from error
        self._platform_version = devices[0].client.platform_version
        super().__init__(
            devices, topology=topology.name, reads=reads, memory_bytes=topology.memory_bytes
        )

    def fingerprint(self) -> Mapping[str, str]:
        """The fingerprint of a client of such chips, so that a TPU host finds the cache's entries."""
        return _fingerprint(self._platform_version, self.devices(), self._flags)

    def numpy_dtype(self, dtype: np.dtype) -> np.dtype:
        """The dtype in which the chips compute ``dtype``: float32 for float64, complex64 for complex128."""
        return _numpy_dtype(dtype)


def create_options(options: Mapping[str, str]) -> dict[str, str | int | float | bool | list[int]]:
    """The options with which libtpu creates a client. Raises ValueError for an invalid number."""
    created: dict[str, str | int | float | bool | list[int]] = {
        "ml_framework_name": "PyTorch/XLA",
        "ml_framework_version": VERSION,
    }
    for variable in (settings.MAX_INFLIGHT, settings.XLA_MAX_INFLIGHT):
        text = variable.text(options)
        if text:
            if not text.isdecimal() or int(text) < 1:
                raise ValueError(
                    f"{variable.name} is {text!r}; set it to a whole number of at least 1"
                )
            created["max_inflight_computations"] = int(text)
    return created
