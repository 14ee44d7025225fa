"""Finds device plugins and extensions by entry point, chooses one device, and starts its client.

Only the chosen device's plugin is imported. Nothing here changes the environment. Every failure
is a ``PluginError`` that names the package, what was found and the next step.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import itertools
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final, TypeAlias, cast

import pluggy

from xla_core.contract import hookspecs
from xla_core.contract.device_protocol import (
    INTERFACE_VERSION,
    OLDEST_INTERFACE_VERSION,
    ClientFactory,
    DeviceClient,
    Topology,
)
from xla_core.contract.foreign_values import ForeignObject
from xla_core.contract.job import Job
from xla_core.multiprocess import job_setup
from xla_core.support import flags

logger = logging.getLogger(__name__)

DEVICE_GROUP: Final = "xla_core.devices"
TORCH_XLA_GROUP: Final = "torch_xla.plugins"
EXTENSION_GROUP: Final = "xla_core.extensions"
_GROUPS: Final = (DEVICE_GROUP, TORCH_XLA_GROUP, EXTENSION_GROUP)

DEVICE_VARIABLE: Final = flags.PJRT_DEVICE.name
_PREFERRED: Final = "tpu"
_FALLBACK: Final = "cpu"

INSTALL_HINTS: Final[Mapping[str, str]] = {
    "cpu": "xla-pjrt-cpu",
    "cuda": "xla-pjrt-cuda",
    "tpu": "xla-pjrt-tpu",
    "null": "xla-core",
}
"""Package that brings a device, by lower-case device name."""

MSG_NONE_CHOSEN: Final = (
    "PJRT_SELECT_DEFAULT_DEVICE=0 and no PJRT_DEVICE: set PJRT_DEVICE to one of {found}"
)
MSG_UNKNOWN_DEVICE: Final = (
    "PJRT_DEVICE={device}: no installed package offers this device. {hint}. "
    "Installed devices: {found}"
)
MSG_HINT_INSTALL: Final = "Run: pip install {package}"
MSG_HINT_SEARCH: Final = (
    "Install the package of its vendor that declares the entry point {name!r} in the group "
    "'xla_core.devices', or set PJRT_DEVICE to an installed device"
)
MSG_TWO_PLUGINS: Final = (
    "PJRT_DEVICE={device}: {first} and {second} both offer this device. Uninstall one of them"
)
MSG_IMPORT_FAILED: Final = (
    "PJRT_DEVICE={device}: {source} is installed but could not be loaded: {kind}: {error}. "
    "Repair or reinstall it"
)
MSG_INTERFACE: Final = (
    "PJRT_DEVICE={device}: {source} is written for interface version {theirs} of xla-core, this "
    "xla-core {core} takes versions {oldest} to {ours}. Install releases of the two that belong together"
)
MSG_START_FAILED: Final = (
    "PJRT_DEVICE={device}: {source} could not start its client: {kind}: {error}"
)
MSG_UNKNOWN_HOOK: Final = (
    "{source} implements the hook {hook!r}, which xla-core {core} does not have{suggestion}"
)
MSG_BAD_HOOK: Final = "{source} has a hook that does not fit its specification: {error}"
MSG_BAD_EXTENSION: Final = (
    "the extension {source} is installed but could not be loaded: {kind}: {error}. "
    "Repair it or uninstall it"
)


class PluginError(RuntimeError):
    """A device plugin or extension is missing, broken, of another version, or there twice."""


class NoDeviceChosenError(PluginError):
    """No device was named, and none may be chosen."""


@dataclasses.dataclass(frozen=True)
class _Registered:
    """A factory given in code, in the place of an entry point."""

    name: str
    value: str
    factory: object
    dist: metadata.Distribution | None = None

    def load(self) -> object:
        return self.factory


_Point: TypeAlias = metadata.EntryPoint | _Registered

_registered: dict[str, _Registered] = {}


def register_factory(device_type: str, factory: object, source: str) -> None:
    """Let ``PJRT_DEVICE=device_type`` be started by ``factory``, before any installed plugin.

    ``source`` says in errors where it comes from.
    """
    name = device_type.lower()
    _registered[name] = _Registered(name, source, factory)


def torch_xla_plugins() -> list[str]:
    """Names of the installed plugins of torch_xla's kind; ``XLA_REGISTER_INSTALLED_PLUGINS=0``: none."""
    if not flags.REGISTER_INSTALLED_PLUGINS.get():
        return []
    return sorted({point.name.lower() for point in _entry_points(TORCH_XLA_GROUP)})


def load_torch_xla_plugin(device_type: str) -> ForeignObject:
    """The ``DevicePlugin`` that an entry point of ``torch_xla.plugins`` names.

    Raises PluginError when it cannot be imported or made.
    """
    point = _only(device_type, _named(TORCH_XLA_GROUP, device_type))
    try:
        return point.load()()
    except Exception as error:  # a plugin's import may fail in any way; all of them end here
        raise PluginError(_failure(MSG_IMPORT_FAILED, device_type, point, error)) from error


def installed_devices() -> list[str]:
    """Names that PJRT_DEVICE accepts here, upper-case and sorted; nothing is imported."""
    names = {point.name.upper() for point in _entry_points(DEVICE_GROUP)}
    return sorted(names | {n.upper() for n in (*_registered, *torch_xla_plugins())})


def chosen_device(options: Mapping[str, str] | None = None) -> str:
    """The device type to use, upper-case: PJRT_DEVICE, else a TPU that is there, else the CPU.

    ``options`` stands for the environment (the default). The environment itself is left as it is.
    Raises NoDeviceChosenError when PJRT_DEVICE is unset and PJRT_SELECT_DEFAULT_DEVICE is 0.
    """
    options = os.environ if options is None else options
    named = flags.PJRT_DEVICE.text(options)
    if named:
        return named.upper()
    if not flags.SELECT_DEFAULT_DEVICE.get(options):
        raise NoDeviceChosenError(MSG_NONE_CHOSEN.format(found=", ".join(installed_devices())))
    if _is_available(_PREFERRED, options):
        logger.warning("libtpu.so and TPU device found. Setting PJRT_DEVICE=TPU.")
        return _PREFERRED.upper()
    logger.warning("Defaulting to PJRT_DEVICE=CPU")
    return _FALLBACK.upper()


def load_factory(device_type: str) -> ClientFactory:
    """Import the plugin of one device. Raises PluginError if that cannot be done."""
    point = _device_point(device_type)
    if getattr(point, "group", "") == TORCH_XLA_GROUP:
        adapt = importlib.import_module("xla_core.plugins.torch_xla_plugins").factory
        return cast(ClientFactory, adapt(device_type, load_torch_xla_plugin(device_type)))
    try:
        factory = point.load()
    except Exception as error:  # a plugin's import may fail in any way; all of them end here
        raise PluginError(_failure(MSG_IMPORT_FAILED, device_type, point, error)) from error
    _check_interface(device_type, point, getattr(factory, "interface_version", INTERFACE_VERSION))
    return cast(ClientFactory, factory)


def job_of(device_type: str, options: Mapping[str, str]) -> Job | None:
    """The job that this process belongs to, or None if it is alone.

    Asked in this order: the environment ``options`` (``job_setup.job_from_environment``), and the device's plugin,
    which may know the host's surroundings (``ClientFactory``). Raises what the plugin raises.
    """
    if job_setup.describes_a_job(options):
        return job_setup.job_from_environment(options)
    if getattr(_device_point(device_type), "group", "") == TORCH_XLA_GROUP:
        return None  # plugins of torch_xla's kind are asked nothing, and made once: when their client starts
    ask = getattr(load_factory(device_type), "job", None)
    job: Job | None = None if ask is None else ask(options)
    return job


def start_client(
    device_type: str,
    manager: pluggy.PluginManager,
    options: Mapping[str, str] | None = None,
) -> DeviceClient:
    """Ask the extensions of ``manager`` for the topology, then start the client of the plugin for ``device_type``.

    ``options`` are environment variables as the plugin sees them; without them, the process's own. Raises
    PluginError for whatever goes wrong in the plugin, with its own error as the cause.
    """
    options = os.environ if options is None else options
    factory = load_factory(device_type)
    point = _device_point(device_type)
    topology = manager.hook.xla_core_topology(device_type=device_type.upper(), options=options)
    job = None if topology else job_of(device_type, options)
    if job is not None:
        topology = job_setup.topology(job)
    try:
        client = factory(topology or Topology(), options)
    except Exception as error:  # vendors raise what they like; the user needs the package's name
        raise PluginError(_failure(MSG_START_FAILED, device_type, point, error)) from error
    _check_interface(device_type, point, getattr(client, "interface_version", None))
    manager.hook.xla_core_client_started(client=client)
    return client


def load_extensions() -> pluggy.PluginManager:
    """A plugin manager with every installed extension registered and its hooks checked.

    Raises PluginError for an extension that cannot be imported or has an unknown or ill-fitting
    hook.
    """
    manager = new_manager()
    for point in _entry_points(EXTENSION_GROUP):
        try:
            extension = point.load()
        except Exception as error:  # as above: any failure of a foreign import
            text = MSG_BAD_EXTENSION.format(
                source=_source(point), kind=type(error).__name__, error=error
            )
            raise PluginError(text) from error
        register(manager, extension, _source(point))
    return manager


def new_manager() -> pluggy.PluginManager:
    """A plugin manager that knows xla-core's hooks and no extension."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def register(manager: pluggy.PluginManager, extension: object, source: str) -> None:
    """Add one extension. Raises PluginError that names ``source`` if one of its hooks is wrong."""
    try:
        manager.register(extension, name=source)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        text = _unknown_hook(manager, extension, source) or MSG_BAD_HOOK.format(
            source=source, error=" ".join(str(error).split())
        )
        if manager.is_registered(extension):
            manager.unregister(extension)
        raise PluginError(text) from error


def _unknown_hook(manager: pluggy.PluginManager, extension: object, source: str) -> str | None:
    known = [name for name in vars(hookspecs) if name.startswith(hookspecs.PROJECT)]
    for name in dir(extension):
        if name not in known and manager.parse_hookimpl_opts(extension, name) is not None:
            close = difflib.get_close_matches(name, known, n=1)
            suggestion = f"; did you mean {close[0]!r}?" if close else ""
            return MSG_UNKNOWN_HOOK.format(
                source=source, hook=name, core=_core_version(), suggestion=suggestion
            )
    return None


@functools.lru_cache(maxsize=1)
def _installed(searched: tuple[object, ...]) -> metadata.EntryPoints:
    """The entry points of all installed packages; ``searched`` is ``_searched()`` from before.

    Reading them takes 3 ms or more, and a start asks for five groups.
    """
    points = metadata.entry_points()
    chosen = (points.select(group=group) for group in _GROUPS)
    return metadata.EntryPoints(itertools.chain.from_iterable(chosen))


def _searched() -> tuple[object, ...]:
    """What decides which packages are found: the folders of the path, and when they changed (pip adds to them)."""
    folders = [folder for folder in map(Path, sys.path) if folder.exists()]
    return tuple((folder, folder.stat().st_mtime_ns) for folder in folders)


def _entry_points(group: str) -> list[metadata.EntryPoint]:
    # an editable install can be listed twice; a plugin counts once
    chosen = _installed(_searched()).select(group=group)
    return list({(point.name, point.value): point for point in chosen}.values())


def _named(group: str, device_type: str) -> list[metadata.EntryPoint]:
    name = device_type.lower()
    return [point for point in _entry_points(group) if point.name.lower() == name]


def _device_point(device_type: str) -> _Point:
    """Who offers a device: a factory given in code, a plugin of ours, or one of torch_xla's kind."""
    name = device_type.lower()
    if name in _registered:
        return _registered[name]
    points = _named(DEVICE_GROUP, name)
    if not points and name in torch_xla_plugins():
        points = _named(TORCH_XLA_GROUP, name)
    return _only(device_type, points)


def _only(device_type: str, points: list[metadata.EntryPoint]) -> metadata.EntryPoint:
    name = device_type.lower()
    if not points:
        package = INSTALL_HINTS.get(name)
        hint = (
            MSG_HINT_INSTALL.format(package=package)
            if package
            else MSG_HINT_SEARCH.format(name=name)
        )
        raise PluginError(
            MSG_UNKNOWN_DEVICE.format(
                device=device_type.upper(), hint=hint, found=_listed(installed_devices())
            )
        )
    if len(points) > 1:
        first, second = (_source(point) for point in points[:2])
        raise PluginError(
            MSG_TWO_PLUGINS.format(device=device_type.upper(), first=first, second=second)
        )
    return points[0]


def _is_available(name: str, options: Mapping[str, str]) -> bool:
    if not any(point.name.lower() == name for point in _entry_points(DEVICE_GROUP)):
        return False
    probe = getattr(load_factory(name), "is_available", None)
    return bool(probe is not None and probe(options))


def _check_interface(device_type: str, point: _Point, theirs: object) -> None:
    if not (isinstance(theirs, int) and OLDEST_INTERFACE_VERSION <= theirs <= INTERFACE_VERSION):
        raise PluginError(
            MSG_INTERFACE.format(
                device=device_type.upper(),
                source=_source(point),
                theirs=theirs,
                core=_core_version(),
                oldest=OLDEST_INTERFACE_VERSION,
                ours=INTERFACE_VERSION,
            )
        )


def _failure(text: str, device_type: str, point: _Point, error: Exception) -> str:
    return text.format(
        device=device_type.upper(), source=_source(point), kind=type(error).__name__, error=error
    )


def _source(point: _Point) -> str:
    """Package and version of an entry point, as far as they are known, and where it points."""
    if point.dist is None:
        return f"the plugin {point.value}"
    return f"{point.dist.metadata['Name']} {point.dist.version} ({point.value})"


def _core_version() -> str:
    try:
        return metadata.version("xla-core")
    except metadata.PackageNotFoundError:
        return "(not installed as a package)"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
