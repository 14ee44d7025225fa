"""torch_xla's own kind of device plugin: a class that names a PJRT library (``torch_xla.plugins``).

A distribution declares it as an entry point of the group ``torch_xla.plugins``, or a script registers it
with ``register_plugin``; ``PJRT_DEVICE`` then accepts its name in upper case.
"""

from __future__ import annotations

import importlib
from typing import Any

from xla_core.plugins import discovery


class PjRtPlugin:
    """What the runtime asks of a device's plugin: its library, and what its client is created with."""

    platform: str | None = None
    """One of jax's platforms (``cpu``, ``cuda``, ...) whose lowering rules suit the device.

    None: jax's rules for devices that it does not know.
    """

    def library_path(self) -> str:
        """Path of the PJRT C API library."""
        raise NotImplementedError(f"{type(self).__name__} must define library_path()")

    def client_create_options(self) -> dict[str, object]:
        """What the library's client is created with, by the library's own names."""
        return {}

    def requires_xla_coordinator(self) -> bool:
        """Whether processes of a job meet through the coordinator of XLA's runtime."""
        return False


class DevicePlugin(PjRtPlugin):
    """Describes a device by its PJRT library. Subclass it and override what differs."""

    def host_index(self) -> int:
        """The number of this host in the job."""
        return 0

    def physical_chip_count(self) -> int:
        """Chips of this host: how many processes a launcher starts."""
        return 1

    def configure_single_process(self) -> None:
        """Set the environment of a process that is alone. By default nothing is needed."""
        self.configure_multiprocess(0, 1)

    def configure_multiprocess(self, local_rank: int, local_world_size: int) -> None:
        """Set the environment of process ``local_rank`` of ``local_world_size`` on this host.

        Raises NotImplementedError for several processes: override it where the device allows them.
        """
        if local_world_size > 1:
            raise NotImplementedError(
                f"{type(self).__name__} does not say how process {local_rank} of "
                f"{local_world_size} finds its devices; override configure_multiprocess()"
            )


_plugins: dict[str, PjRtPlugin] = {}


def register_plugin(name: str, plugin: PjRtPlugin) -> None:
    """Let ``PJRT_DEVICE=name`` (upper-case) be ``plugin``'s device; it comes before installed ones."""
    _plugins[name.upper()] = plugin
    discovery.register_factory(
        name, factory(name, plugin), f"the registered {type(plugin).__name__}"
    )


_register_pjrt_plugin = register_plugin


def register_installed_plugins() -> None:
    """Register the plugins that distributions declare under ``torch_xla.plugins``.

    ``PJRT_DEVICE`` finds them without this, too. Raises PluginError when one cannot be loaded.
    """
    for name in discovery.torch_xla_plugins():
        if name.upper() not in _plugins:
            register_plugin(name, discovery.load_torch_xla_plugin(name))


def default() -> Any:
    """The plugin of the device in use. Raises RuntimeError when that is not torch_xla's kind."""
    device = discovery.chosen_device()
    if device not in _plugins and device.lower() in discovery.torch_xla_plugins():
        register_plugin(device, discovery.load_torch_xla_plugin(device))
    if device not in _plugins:
        known = ", ".join(sorted(_plugins)) or "none"
        raise RuntimeError(
            f"{device} is not described by a DevicePlugin (registered: {known}); "
            "xla_core.plugins.discovery.load_factory() gives its plugin"
        )
    return _plugins[device]


def factory(name: str, plugin: PjRtPlugin) -> Any:
    """The client factory of ``plugin``: loads its library when the device is first used."""
    library = importlib.import_module("xla_core.pjrt.library")  # jax, which the rest here spares
    return library.LibraryPlugin(
        name,
        path=lambda _options: library.Path(plugin.library_path()),
        platform=plugin.platform or name.lower(),
        plugin=f"torch_xla plugin {name.lower()}",
        create_options=lambda _options: plugin.client_create_options(),
        install_hint=f"{type(plugin).__name__}.library_path() gives that path",
    )
