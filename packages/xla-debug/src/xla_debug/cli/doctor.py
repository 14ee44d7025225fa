"""``xla-debug doctor``: checks the installation and the device, and says how to repair what is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Final

from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

from xla_core.extension_api import plugins, runtime
from xla_core.extension_api.programs import CacheRefusedError, PersistentCache
from xla_core.support import flags
from xla_core.support.own_packages import PACKAGES

OURS: Final = tuple(name.replace("_", "-") for name in PACKAGES)
_OLDEST: Final = (3, 11)
# A variable whose name is so similar to a known one is probably misspelt.
_SIMILAR: Final = 0.88


@dataclasses.dataclass(frozen=True)
class Check:
    """One check: what was ``found``, and in ``mend`` what to do about it; empty if nothing is wrong."""

    name: str
    found: str
    mend: str = ""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's arguments."""
    doctor = commands.add_parser("doctor", help="check the installation and the devices")
    doctor.add_argument("--no-device", action="store_true", help="do not start the device's client")
    doctor.set_defaults(command=command)


def command(chosen: argparse.Namespace) -> int:
    """Print all checks. Returns 1 if something has to be repaired, else 0."""
    console = Console(highlight=False, soft_wrap=True)
    broken = 0
    for check in checks(with_device=not chosen.no_device):
        broken += bool(check.mend)
        mark = Text("FIX " if check.mend else "ok  ", "bold red" if check.mend else "green")
        console.print(mark + Text(f"{check.name}: {check.found}", ""))
        if check.mend:
            console.print(Text(f"      {check.mend}"))
    console.print(f"{broken} to repair" if broken else "nothing is wrong")
    return int(bool(broken))


def checks(with_device: bool = True) -> Iterator[Check]:
    """All checks. With ``with_device`` (default: True), they start the device's client and run a small program."""
    yield _python()
    yield from _versions()
    yield from _requirements()
    yield from _plugins()
    yield from _variables()
    yield from _misspelt()
    yield _cache()
    if with_device:
        yield from _device()


def _python() -> Check:
    version = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] < _OLDEST:
        return Check("Python", version, "install Python 3.11 or newer")
    if platform.system() != "Linux":
        return Check(
            "Python",
            version,
            "the packages are tested on Linux only; use Linux, WSL or a container",
        )
    return Check("Python", version)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Check]:
    ours = {name: v for name in OURS if (v := _version(name)) is not None}
    listed = ", ".join(f"{name} {v}" for name, v in ours.items())
    same = len(set(ours.values())) == 1
    mend = "" if same else f"install one release of all: pip install -U {' '.join(ours)}"
    yield Check("packages of this project", listed, mend)
    for name in ("torch", "jax", "jaxlib", "numpy"):
        version = _version(name)
        yield Check(name, version or "not installed", "" if version else f"pip install {name}")
    yield from _official()


def _official() -> Iterator[Check]:
    """Checks that ``import torch_xla`` finds this project and not the C++ torch_xla, which has the same name."""
    module = importlib.import_module("torch_xla")
    version = str(getattr(module, "__version__", ""))
    origin = str(getattr(module, "__file__", ""))
    mend = ""
    if "xla.core" not in version:
        mend = "another torch_xla is found first; pip uninstall torch_xla, then reinstall xla-core"
    yield Check("import torch_xla", f"{version} from {origin}", mend)


def _requirements() -> Iterator[Check]:
    """Compares the requirements of this project's packages with the installed versions."""
    unmet = []
    for name in OURS:
        if _version(name) is None:
            continue
        for requirement in _requirements_of(name):
            installed = _version(requirement.name)
            if installed is None or not requirement.specifier.contains(installed, prereleases=True):
                unmet.append((name, requirement, installed))
    if not unmet:
        yield Check("requirements", "all met")
    for name, requirement, installed in unmet:
        specifier = f"{requirement.name}{requirement.specifier}"
        difference = f"{name} needs {specifier}, found {installed or 'none'}"
        yield Check("requirements", difference, f"pip install '{specifier}'")


def _requirements_of(name: str, extra: str = "") -> Iterator[Requirement]:
    """The requirements of an installed distribution, and of the extras that it requires (``jax[tpu]``).

    With ``extra``, the requirements that this extra of the distribution adds.
    """
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None:
            applies = not extra
        else:
            applies = marker.evaluate({"extra": extra}) and not (
                extra and marker.evaluate({"extra": ""})
            )
        if not applies:
            continue
        yield requirement
        if not extra and _version(requirement.name) is not None:
            for required_extra in sorted(requirement.extras):
                yield from _requirements_of(requirement.name, required_extra)


def _plugins() -> Iterator[Check]:
    names = plugins.installed_devices()
    real = [n for n in names if n != "NULL"]
    mend = "" if real else "pip install xla-pjrt-cpu (or xla-pjrt-tpu, xla-pjrt-cuda)"
    yield Check("devices installed", ", ".join(names) or "none", mend)
    for name in real:
        try:
            plugins.load_factory(name)
        except plugins.PluginError as error:
            yield Check(f"device plugin {name}", "broken", str(error))
    try:
        extensions = [str(source) for source, _ in plugins.load_extensions().list_name_plugin()]
    except plugins.PluginError as error:
        yield Check("extensions", "broken", str(error))
    else:
        yield Check("extensions", ", ".join(extensions) or "none")


def _variables() -> Iterator[Check]:
    for name, flag in sorted(flags.FLAGS.items()):
        if name in os.environ:  # also if it is set to an empty text
            try:
                flag.get()
            except ValueError as error:
                yield Check(name, repr(flag.text()), str(error))
            else:
                yield Check(name, f"{flag.text()!r}: {flag.meaning}")


def _misspelt() -> Iterator[Check]:
    for name in sorted(os.environ):
        if name in flags.FLAGS or not name.startswith(("XLA_", "PT_XLA_")):
            continue
        for similar in difflib.get_close_matches(name, flags.FLAGS, n=1, cutoff=_SIMILAR):
            yield Check(name, "this variable has no effect", f"did you mean {similar}?")


def _cache() -> Check:
    path = flags.CACHE_PATH.get()
    if not path:
        return Check("persistent cache", "not in use (XLA_PERSISTENT_CACHE_PATH is not set)")
    if not os.path.isdir(path):  # noqa: PTH112 - the text of an environment variable
        return Check("persistent cache", f"{path}, not created yet")
    try:
        PersistentCache(path, readonly=True)
    except CacheRefusedError as error:
        return Check("persistent cache", path, str(error))
    free = shutil.disk_usage(path).free
    mend = "free some space: xla-debug cache prune" if free < 1 << 30 else ""
    return Check("persistent cache", f"{path}, {free / 1e9:.1f} GB free on its disk", mend)


def _device() -> Iterator[Check]:
    try:
        client = runtime.client()
    except (RuntimeError, ValueError) as error:
        yield Check("device", "cannot be started", str(error))
        return
    names = [f"{d.kind} ({d.platform}:{d.id})" for d in client.local_devices()]
    yield Check("device", f"{runtime.device_type()}: {', '.join(names)}")
    torch = importlib.import_module("torch")
    try:
        result = (torch.arange(4.0, device="xla") * 2).sum().item()
    except Exception as error:
        yield Check("a small program", f"failed: {type(error).__name__}", str(error))
        return
    mend = (
        ""
        if result == 12.0
        else "the result must be 12.0; reinstall the device's plugin and runtime"
    )
    yield Check("a small program", f"gives {result}", mend)
