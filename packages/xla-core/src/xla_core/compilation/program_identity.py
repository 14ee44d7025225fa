"""What a program's identity in the persistent cache is made of, besides the step itself.

The step's text is written by ``build_program.key_text``; here are the device, the extensions, and the source of
all that lowers.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import sys
from collections.abc import Iterable
from typing import Final

import jax
import pluggy
import torch

from xla_core.compilation import disk_cache
from xla_core.compilation.disk_cache import CacheKey
from xla_core.contract.device_protocol import DeviceClient, Placement
from xla_core.operators import decompositions, lowering_registry, source_digests
from xla_core.operators.extensions import extensions


def cache_key(
    client: DeviceClient, text: bytes, name: str, placement: Placement
) -> CacheKey | None:
    """The persistent cache's key of a step, or None when no cache is in use."""
    if disk_cache.current() is None:
        return None
    entries = (
        ("program", text),
        *environment(client),
        ("placement", repr(placement).encode()),
    )
    return CacheKey(entries, name)


def environment(client: DeviceClient) -> tuple[tuple[str, bytes], ...]:
    """The entries of the persistent cache's keys that are the same for all of a process's programs."""
    manager = extensions()
    entries = [("lowering", lowering_version())]
    entries += rules_outside(_shaping_modules(client, manager))
    entries += [(f"device:{k}", v.encode()) for k, v in sorted(client.fingerprint().items())]
    for found in manager.hook.xla_core_cache_key_entries():
        entries += [(f"extension:{k}", v) for k, v in sorted(found.items())]
    return tuple(entries)


# Who implements one of them decides what is in a program.
_SHAPING: Final = frozenset({
    "xla_core_make_backends", "xla_core_register_operators", "xla_core_partition_program",
    "xla_core_over_parts", "xla_core_replicated_executable",
})  # fmt: skip


def _shaping_modules(client: DeviceClient, manager: pluggy.PluginManager) -> frozenset[str]:
    """The modules, by name, of the device's plugin and of the extensions that take part in lowering."""
    names = {type(client).__module__}
    for extension in manager.get_plugins():
        callers = manager.get_hookcallers(extension) or ()
        if any(caller.name in _SHAPING for caller in callers):
            names.add(getattr(extension, "__name__", type(extension).__module__))
    return frozenset(names)


_ROOT: Final = pathlib.Path(__file__).parents[1]
# What ``lowering_version`` covers: this package by its source, these by their versions.
_VERSIONED: Final = tuple(f"{root}{os.sep}" for root in (_ROOT, *torch.__path__, *jax.__path__))


def rules_outside(modules: Iterable[str]) -> list[tuple[str, bytes]]:
    """Entries of cache keys: digests of the code outside this package that lowers, where there is any.

    It is that of every rule and decomposition registered by now, and of ``modules`` (their names): their
    files and what these need of their own packages. What a package reads otherwise (a table in a file, a
    library of kernels) it names itself, by ``xla_core_cache_key_entries``.
    """
    loaded = (sys.modules.get(name) for name in modules)
    named = {getattr(module, "__file__", None) for module in loaded if module is not None}
    starts = (
        lowering_registry.source_files() | decompositions.source_files() | {n for n in named if n}
    )
    outside = {start for start in starts if not start.startswith(_VERSIONED)}
    entries = [("rules", source_digests.digest(outside))] if outside else []
    unfiled = lowering_registry.unfiled()
    if unfiled:
        text = b"".join(name.encode() + b"\0" + unfiled[name] for name in sorted(unfiled))
        entries.append(("rules without files", hashlib.sha256(text).digest()))
    return entries


@functools.cache
def lowering_version() -> bytes:
    """A digest of all that decides how a step is lowered: our rules, torch's and jax's versions."""
    digest = hashlib.sha256()
    root = _ROOT
    for path in sorted(root.rglob("*.py"), key=pathlib.Path.as_posix):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    digest.update(torch.__version__.encode())
    digest.update(importlib.metadata.version("jax").encode())
    return digest.digest()
