"""Device plugins of torch_xla: classes that name a PJRT library (``torch_xla.plugins``).

A distribution declares such a class as an entry point of the group ``torch_xla.plugins``, or a script registers an
instance with ``register_plugin``. ``PJRT_DEVICE`` then accepts its name in upper case.
"""

from __future__ import annotations

import importlib

from xla_core.contract.device_protocol import ClientFactory
from xla_core.plugins import discovery


class PjRtPlugin:
    """A device plugin: its PJRT library, and the options of its client."""

    platform: str | None = None
    """The platform of jax (``cpu``, ``cuda``, ...) whose lowering rules suit the device.

    None (default) selects jax's rules for unknown devices.
    """

    def library_path(self) -> str:
        """The path of the library with the PJRT C API. Override it: this one raises NotImplementedError."""
        raise NotImplementedError(f"{type(self).__name__} must define library_path()")

    def client_create_options(self) -> dict[str, object]:
        """The options with which the library creates a client, by the library's names (default: none)."""
        return {}

    def requires_xla_coordinator(self) -> bool:
        """Whether the processes of a job find each other through the coordinator of XLA's runtime."""
        return False


class DevicePlugin(PjRtPlugin):
    """A device plugin that also configures processes. Subclass it, and override the methods that differ."""

    def host_index(self) -> int:
        """The number of this host in the job."""
        return 0

    def physical_chip_count(self) -> int:
        """The number of this host's chips, for each of which a launcher starts a process."""
        return 1

    def configure_single_process(self) -> None:
        """Set the environment of a single process; calls ``configure_multiprocess(0, 1)`` unless overridden."""
        self.configure_multiprocess(0, 1)

    def configure_multiprocess(self, local_rank: int, local_world_size: int) -> None:
        """Set the environment of process ``local_rank`` of the ``local_world_size`` processes of this host.

        Raises NotImplementedError for several processes; override it if the device allows them.
        """
        if local_world_size > 1:
            raise NotImplementedError(
                f"{type(self).__name__} does not say how process {local_rank} of "
                f"{local_world_size} finds its devices; override configure_multiprocess()"
            )


_plugins: dict[str, PjRtPlugin] = {}


def register_plugin(name: str, plugin: PjRtPlugin) -> None:
    """Register ``plugin`` for ``PJRT_DEVICE=NAME``, ``name`` in upper case; it overrides an installed plugin."""
    _plugins[name.upper()] = plugin
    discovery.register_factory(
        name, factory(name, plugin), f"the registered {type(plugin).__name__}"
    )


_register_pjrt_plugin = register_plugin


def register_installed_plugins() -> None:
    """Register the plugins that distributions declare under ``torch_xla.plugins``.

    ``PJRT_DEVICE`` finds them even without this call. Raises PluginError if one cannot be loaded.
    """
    for name in discovery.torch_xla_plugins():
        if name.upper() not in _plugins:
            register_plugin(name, discovery.load_torch_xla_plugin(name))


def default() -> PjRtPlugin:
    """The plugin of the device in use. Raises RuntimeError if that device has no ``DevicePlugin``."""
    device = discovery.chosen_device()
    if device not in _plugins and device.lower() in discovery.torch_xla_plugins():
        register_plugin(device, discovery.load_torch_xla_plugin(device))
    if device not in _plugins:
        known = ", ".join(sorted(_plugins)) or "none"
        raise RuntimeError(
            f"{device} is not described by a DevicePlugin (registered: {known}); "
            "xla_core.plugins.discovery.load_factory() returns its plugin"
        )
    return _plugins[device]


def factory(name: str, plugin: PjRtPlugin) -> ClientFactory:
    """The client factory of ``plugin``, which loads its library when the device is first used."""
    library = importlib.import_module(
        "xla_core.pjrt.library"
    )  # imports jax, which this module avoids
    return library.LibraryPlugin(
        name,
        path=lambda _options: library.Path(plugin.library_path()),
        platform=plugin.platform or name.lower(),
        plugin=f"torch_xla plugin {name.lower()}",
        create_options=lambda _options: plugin.client_create_options(),
        install_hint=f"{type(plugin).__name__}.library_path() returns that path",
    )
