"""Finds and loads libtpu, with the settings that it reads from the environment.

The environment is changed only while libtpu initializes.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import xla_pjrt_tpu.settings as settings
from xla_core.pjrt import runtime_library
from xla_core.support import flags

logger = logging.getLogger(__name__)

LIBRARY: Final = "tpu"
"""The name under which jaxlib registers the library; jax uses the same."""

# torch_xla 2.9 adds these flags to LIBTPU_INIT_ARGS unless the user sets them.
DEFAULT_FLAGS: Final[Mapping[str, str]] = {
    "xla_tpu_use_enhanced_launch_barrier": "false",
    "xla_latency_hiding_scheduler_rerun": "1",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_enable_flash_attention": "false",
}

# Without a TPU no metadata describes the host, and libtpu would query the network for minutes.
_WITHOUT_CHIPS: Final[Mapping[str, str]] = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # its lock file protects chips, of which there are none
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}

MSG_NO_LIBRARY: Final = (
    "libtpu, the TPU's compiler and runtime, was not found: TPU_LIBRARY_PATH is {variable}, and the "
    "package libtpu {package}. It exists for Linux on x86-64. Run: pip install xla-pjrt-tpu"
)

_lock = threading.Lock()


def find_library(options: Mapping[str, str]) -> Path | None:
    """The path of libtpu.so: ``TPU_LIBRARY_PATH``, or that of the package ``libtpu``.

    None if there is no such file.
    Does not import the package, which would set environment variables.
    """
    named = settings.LIBRARY_PATH.text(options)
    if named:
        return Path(named) if Path(named).is_file() else None
    spec = importlib.util.find_spec("libtpu")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "libtpu.so"
        if path.is_file():
            return path
    return None


def package_version() -> str | None:
    """The version of the installed package ``libtpu``; None without it."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def init_args(options: Mapping[str, str]) -> str:
    """``LIBTPU_INIT_ARGS``, with the default flags that it does not set."""
    of_user = settings.LIBTPU_INIT_ARGS.text(options)
    set_there = flags.values_in(of_user)
    added = [f"--{name}={value}" for name, value in DEFAULT_FLAGS.items() if name not in set_there]
    return " ".join([of_user.strip(), *added]).strip()


def load(options: Mapping[str, str], *, chips: bool, megacore: bool = False) -> str:
    """Load and initialize libtpu in the first call; returns the flags in force.

    Without ``chips``, libtpu only compiles, and queries neither the host nor the network. ``megacore`` (default:
    False) passes on ``TPU_MEGACORE``. Raises RuntimeError if there is no library, or if it does not fit jaxlib.
    """
    path = find_library(options)
    if path is None:
        named = settings.LIBRARY_PATH.text(options)
        variable = f"{named}, which is not a file" if named else "not set"
        installed = package_version()
        package = f"{installed} lacks libtpu.so" if installed else "is not installed"
        raise RuntimeError(MSG_NO_LIBRARY.format(variable=variable, package=package))
    wanted = init_args(options)
    with _lock:
        if LIBRARY in _flags_in_force:
            return _flags_in_force[LIBRARY]
        if runtime_library.library_loaded(LIBRARY):
            in_force = _flags_in_force[LIBRARY] = _foreign_flags(options, wanted)
            return in_force
        variables = {
            settings.LIBTPU_INIT_ARGS.name: wanted,
            settings.ML_PLATFORM.name: "PyTorch/XLA",
        }
        if not chips:
            variables |= _WITHOUT_CHIPS
        elif megacore:
            variables[settings.MEGACORE.name] = settings.MEGACORE.get(options)
        with environment(variables):
            runtime_library.load_library(LIBRARY, str(path))
        _flags_in_force[LIBRARY] = wanted
    return wanted


_flags_in_force: dict[str, str] = {}


def _foreign_flags(options: Mapping[str, str], wanted: str) -> str:
    """The flags of the libtpu that jax has already loaded in this process.

    Warns that ``wanted`` are not in force.
    """
    loaded = settings.LIBTPU_INIT_ARGS.text(options)
    logger.warning(
        "jax loaded libtpu before the xla device was used: its flags are %r, not %r. "
        "Create the first xla tensor before you use jax to get the latter",
        loaded,
        wanted,
    )
    return loaded


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """A block in which ``variables`` are set in the process's environment, where C++ libraries read them."""
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
