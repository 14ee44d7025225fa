"""The identity of a compiled program, by which all caches look up programs.

The caches are those of a recorded step (``Entry.programs``), of single operators (``execution.op_by_op``), of the
graphs of ``torch.compile`` (``dynamo.compiled_graph``), and the one on disk (``disk_cache``). In memory, the
entries of an identity are objects that are comparable within the process. On disk they are bytes that are equal in
every process, and include what is the same for all programs of a process: the device, the extensions, and the
source of every rule and of all other code that lowers. In memory this is not compared, because a registered rule
cannot be replaced.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import sys
from collections.abc import Hashable, Iterable
from typing import Final, Generic, NamedTuple, TypeVar

import jax
import pluggy
import torch

from xla_core.compilation import disk_cache
from xla_core.compilation.disk_cache import CacheKey
from xla_core.contract.device_protocol import DeviceClient, Placement
from xla_core.contract.foreign_values import ForeignObject
from xla_core.lowering import compile_settings
from xla_core.lowering.step_program import outlining_of
from xla_core.operators import decompositions, lowering_registry, source_digests
from xla_core.operators.extensions import extensions
from xla_core.recording.program_layout import Layout
from xla_core.recording.storage import Backend
from xla_core.recording.trace import Trace

_What = TypeVar("_What", bound=ForeignObject)


class StepResults(NamedTuple):
    """What a program computes of a recorded step: the numbers of the wanted values, and its donations.

    ``donations`` pairs the slot of an input with the number of the value that may reuse its memory. ``taken``
    are those of them that the user asked for. A program must have these, because the input's value is given away.
    """

    outputs: tuple[int, ...]
    donations: tuple[tuple[int, int], ...]
    taken: tuple[tuple[int, int], ...] = ()


class ProgramIdentity(NamedTuple, Generic[_What]):
    """Everything that determines a compiled program, as named entries: equal identities mean equal programs.

    ``what`` is what the program computes: in memory the results of the step that the cache belongs to, an
    operation, or the signature of a graph's arguments; on disk the step as text. ``device`` is a PyTorch device in
    memory, and on disk its client, which represents ``environment``. ``settings`` are the user's settings for
    making programs (``compile_settings``), and ``layouts`` says how values are split over devices.
    """

    what: _What
    device: torch.device | DeviceClient
    settings: str | bytes
    layouts: Hashable

    @property
    def surroundings(self) -> tuple[object, ...]:
        """All entries but ``what``."""
        return self[1:]

    def digest(self) -> str:
        """The digest of an identity that is made of bytes: 32 hexadecimal digits, equal in every process."""
        return hashlib.sha256(self.what + self.settings + self.layouts).hexdigest()[:32]

    def cache_key(self, name: str, placement: Placement) -> CacheKey | None:
        """The persistent cache's key of an identity that is made of bytes; None if no cache is in use.

        ``name`` is the program's name in log lines, ``placement`` are the devices that it runs on.
        """
        if disk_cache.current() is None:
            return None
        entries: tuple[tuple[str, ForeignObject], ...] = (
            ("program", self.what),
            ("settings", self.settings),
            ("layouts", self.layouts),
            *environment(self.device),
            ("placement", repr(placement).encode()),
        )
        return CacheKey(entries, name)


# Does what a named tuple's constructor does in half the time: identities are made at each sync.
_tuple: Final = tuple.__new__


def in_memory(trace: Trace, what: _What, layouts: Hashable = None) -> ProgramIdentity[_What]:
    """The identity, in this process, of the program that computes ``what`` on the device of ``trace`` now."""
    return _tuple(ProgramIdentity, (what, trace.device, compile_settings.token(), layouts))


def of_results(
    trace: Trace,
    outputs: tuple[int, ...],
    donations: tuple[tuple[int, int], ...],
    marked: tuple[tuple[int, int], ...] = (),
) -> ProgramIdentity[StepResults]:
    """The identity, in this process, of a program of the step that ``trace`` has recorded.

    ``outputs`` are the numbers of the wanted values. ``donations`` are the pairs of an input's slot and the number
    of the wanted value that reuses its memory; ``marked`` are those that the user asked for (default: none).
    """
    results = _tuple(StepResults, (outputs, donations, marked))
    return in_memory(trace, results, trace.backend.input_layouts(trace))


def of_step(backend: Backend, text: bytes, layout: Layout) -> ProgramIdentity[bytes]:
    """The identity, in every process, of the program of a step.

    ``text`` is the complete step (``build_program.key_text``), ``layout`` its layout over the devices.
    """
    outlining = f"\n{outlining_of(backend.client)}".encode()
    settings = outlining + compile_settings.key_text(backend.formats)
    return ProgramIdentity(text, backend.client, settings, layout.key_text())


def environment(client: DeviceClient) -> tuple[tuple[str, bytes], ...]:
    """The entries of persistent cache keys that are the same for all programs of a process."""
    manager = extensions()
    entries = [("lowering", lowering_version())]
    entries += rules_outside(_shaping_modules(client, manager))
    entries += [(f"device:{k}", v.encode()) for k, v in sorted(client.fingerprint().items())]
    for added in manager.hook.xla_core_cache_key_entries():
        entries += [(f"extension:{k}", v) for k, v in sorted(added.items())]
    return tuple(entries)


# An extension that implements one of these hooks influences the content of programs.
_SHAPING: Final = frozenset({
    "xla_core_make_backends", "xla_core_register_operators", "xla_core_partition_program",
    "xla_core_over_parts", "xla_core_replicated_executable",
})  # fmt: skip


def _shaping_modules(client: DeviceClient, manager: pluggy.PluginManager) -> frozenset[str]:
    """The names of the modules of the device's plugin and of the extensions that influence programs."""
    names = {type(client).__module__}
    for extension in manager.get_plugins():
        callers = manager.get_hookcallers(extension) or ()
        if any(caller.name in _SHAPING for caller in callers):
            names.add(getattr(extension, "__name__", type(extension).__module__))
    return frozenset(names)


_ROOT: Final = pathlib.Path(__file__).parents[1]
# Covered by ``lowering_version``: this package by its source, torch and jax by their versions.
_VERSIONED: Final = tuple(f"{root}{os.sep}" for root in (_ROOT, *torch.__path__, *jax.__path__))


def rules_outside(modules: Iterable[str]) -> list[tuple[str, bytes]]:
    """Entries of cache keys with digests of code outside this package that takes part in lowering, if there is any.

    This is the code of every rule and decomposition that is registered by now, and of ``modules`` (by name): their
    files, and what these import from their own packages. If a package reads anything else (a table in a file, a
    library of kernels), it must name it by ``xla_core_cache_key_entries``.
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
    """A digest of what determines how a step is lowered: this package's source, and torch's and jax's versions."""
    digest = hashlib.sha256()
    root = _ROOT
    for path in sorted(root.rglob("*.py"), key=pathlib.Path.as_posix):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    digest.update(torch.__version__.encode())
    digest.update(importlib.metadata.version("jax").encode())
    return digest.digest()
