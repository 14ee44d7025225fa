"""A device plugin around any vendor's PJRT C API library, by path.

A vendor's package declares one ``LibraryPlugin`` as its entry point in the group ``xla_core.devices``:

    create_client = LibraryPlugin("ACME", path=Path(__file__).with_name("libacme.so"), platform="cpu")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from xla_core.contract.device_protocol import INTERFACE_VERSION, DeviceClient, Topology
from xla_core.jax_bridge import pjrt_c_api
from xla_core.pjrt.client import PjrtClient
from xla_core.pjrt.topology_client import TopologyClient
from xla_core.support import flags

__all__ = [
    "CreateOptions",
    "LibraryPlugin",
]

CreateOptions = pjrt_c_api.CreateOptions

MSG_NO_LIBRARY: Final = "{device}: there is no PJRT library at {path}; {hint}"
MSG_NOT_LOADED: Final = (
    "{device}: {path} could not be loaded as a PJRT C API library: {error}. It must export GetPjrtApi, "
    "and its API version must be one that jaxlib {jaxlib} works with"
)
MSG_NO_TOPOLOGY: Final = "{device}: the library {path} has no topology {topology!r}: {error}"


class LibraryPlugin:
    """The entry point of a device whose runtime is a PJRT C API library.

    ``device_type`` is the name in ``PJRT_DEVICE``. ``path`` is the library, or a function of the
    environment that gives its path or None; ``path_variable`` names the environment variable that
    overrides it. ``platform`` is the one of jax's platforms (``cpu``, ``tpu``, ``cuda``, ``rocm``)
    whose lowering rules suit the device. ``create_options`` turns the environment into what the
    library's client is created with. ``client_class`` may be a subclass of ``PjrtClient`` with what
    is the device's own (number formats, outlining).
    """

    interface_version = INTERFACE_VERSION

    def __init__(
        self,
        device_type: str,
        *,
        path: Path | str | Callable[[Mapping[str, str]], Path | None],
        platform: str = "cpu",
        plugin: str | None = None,
        version: str = "",
        path_variable: str | None = None,
        create_options: Callable[[Mapping[str, str]], CreateOptions] | None = None,
        client_class: type[PjrtClient] = PjrtClient,
        install_hint: str = "reinstall the package of the device",
    ) -> None:
        self.device_type = device_type.upper()
        self.platform = platform
        self._path = path
        self._path_variable = path_variable
        self._create_options = create_options or _no_options
        self._hint = install_hint
        names = {
            "device_type": self.device_type,
            "plugin": plugin or f"xla-pjrt-{device_type.lower()}",
            "version": version,
            "platform": platform,
        }
        self._client_class = type(f"{device_type.title()}Client", (client_class,), names)
        self._topology_class = type(f"{device_type.title()}Topology", (TopologyClient,), names)

    def __call__(self, topology: Topology, options: Mapping[str, str]) -> DeviceClient:
        """Load the library and start its client, or one for ``XLA_AOT_TOPOLOGY``.

        Raises RuntimeError when the library is missing, does not fit, or finds no device. For one whose
        StableHLO is too old or too new it names both versions.
        """
        name = self.load(options)
        wanted = topology.aot_topology or flags.AOT_TOPOLOGY.text(options)
        if wanted:
            described: DeviceClient = self._topology_client(name, wanted, options)
            return described
        created = dict(self._create_options(options))
        if topology.process_count > 1:
            created |= {"node_id": topology.process_index, "num_nodes": topology.process_count}
        client = pjrt_c_api.make_client(name, created, topology.distributed_client)
        misfit = pjrt_c_api.stablehlo_misfit(client)
        if misfit is not None:
            raise RuntimeError(f"{self.device_type}: {misfit}")
        return self._client_class(client, process_index=topology.process_index)

    def is_available(self, options: Mapping[str, str]) -> bool:
        """Whether the library is there; it is not loaded."""
        return self.find(options) is not None

    def find(self, options: Mapping[str, str]) -> Path | None:
        """The library's path, or None where there is no such file."""
        named = options.get(self._path_variable, "") if self._path_variable else ""
        if named:
            path: Path | None = Path(named)
        else:
            path = self._path(options) if callable(self._path) else Path(self._path)
        return path if path is not None and path.is_file() else None

    def load(self, options: Mapping[str, str]) -> str:
        """Load the library once; returns the name under which jaxlib keeps it."""
        path = self.find(options)
        if path is None:
            raise RuntimeError(self._missing(options))
        name = self.device_type.lower()
        try:
            pjrt_c_api.load_library(name, str(path))
        except RuntimeError as error:
            text = MSG_NOT_LOADED.format(
                device=self.device_type, path=path, error=error, jaxlib=pjrt_c_api.JAXLIB_VERSION
            )
            raise RuntimeError(text) from error
        return name

    def _missing(self, options: Mapping[str, str]) -> str:
        named = options.get(self._path_variable, "") if self._path_variable else ""
        hint = self._hint
        if self._path_variable:
            hint += f", or set {self._path_variable} to the library's path"
        shown = named or ("any known place" if callable(self._path) else self._path)
        return MSG_NO_LIBRARY.format(device=self.device_type, path=shown, hint=hint)

    def _topology_client(self, name: str, wanted: str, options: Mapping[str, str]) -> DeviceClient:
        try:
            devices = pjrt_c_api.topology_devices(name, wanted, {})
        except RuntimeError as error:
            text = MSG_NO_TOPOLOGY.format(
                device=self.device_type, path=self.find(options), topology=wanted, error=error
            )
            raise RuntimeError(text) from error
        reads = flags.AOT_READS.get(options).strip().lower()
        return self._topology_class(devices, topology=wanted, reads=reads)


def _no_options(options: Mapping[str, str]) -> CreateOptions:
    del options
    return {}
