"""The hooks through which other packages take part in decisions that are made rarely (pluggy specifications).

An extension is an entry point of the group ``xla_core.extensions``: a module or object with
functions of these names, marked with ``hookimpl``. None of them runs per operation. Subscribers
and registries are handed over once, at the start; a hook may leave out arguments it does not use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import pluggy

from xla_core.contract.device_protocol import DeviceClient, Executable, Program, Topology
from xla_core.contract.events import Events
from xla_core.contract.foreign_values import AnyFunction
from xla_core.contract.step_sharding import ShardingChoice, StepToSplit

__all__ = [
    "OperatorRegistry",
    "PROJECT",
    "hookimpl",
    "hookspec",
    "xla_core_cache_key_entries",
    "xla_core_choose_shardings",
    "xla_core_client_started",
    "xla_core_kept_in_step",
    "xla_core_make_backends",
    "xla_core_over_parts",
    "xla_core_partition_program",
    "xla_core_register_operators",
    "xla_core_replicated_executable",
    "xla_core_subscribe",
    "xla_core_topology",
]

PROJECT: Final = "xla_core"

hookspec: Final = pluggy.HookspecMarker(PROJECT)
hookimpl: Final = pluggy.HookimplMarker(PROJECT)
"""The marker that extensions put on their hook functions."""


@hookspec(firstresult=True)
def xla_core_topology(device_type: str, options: Mapping[str, str]) -> Topology | None:
    """This process's place in the job, asked once before the client of ``device_type`` starts.

    ``device_type`` is upper-case (``"CPU"``), ``options`` the environment. The first answer that
    is not None counts; without one it is ``distributed.topology``: what the environment says of a
    job of several processes. An implementation may connect to a coordinator and wait for other
    processes here.
    """


@hookspec
def xla_core_client_started(client: DeviceClient) -> None:
    """The client has started and its devices are known. Called once, before the first transfer."""


@hookspec(firstresult=True)
def xla_core_make_backends(client: DeviceClient) -> Sequence[object] | None:
    """The devices that PyTorch sees, each an ``extension_api.backends.Backend``; None: one per local device.

    Asked when the client starts, and again when an extension calls ``runtime.reattach``.
    """


class OperatorRegistry(Protocol):
    """The registry of lowering rules: the functions of ``extension_api.operators`` with the same names."""

    @property
    def rule(self) -> Callable[..., Callable[[AnyFunction], AnyFunction]]:
        """``rule(*overloads)`` is a decorator; see ``extension_api.operators.rule``."""
        ...


@hookspec
def xla_core_register_operators(registry: OperatorRegistry) -> None:
    """Add lowering rules to ``registry``; a second rule for one overload is an error there."""


@hookspec(firstresult=True)
def xla_core_partition_program(program: Program) -> Program | None:
    """A replacement for a lowered program before it is compiled, or None to leave it.

    The replacement may change placement, counts, shardings and options. Called only for a program
    that neither the memory cache nor the persistent cache has.
    """


@hookspec(firstresult=True)
def xla_core_over_parts(
    function: Callable[..., object],
    tensors: Sequence[object],
    specs: Sequence[object],
    results: Sequence[tuple[object, tuple[int, ...]]],
    mesh: object,
) -> object:
    """Apply ``function`` to the shards of ``tensors`` on each device; returns whole tensors, or None.

    ``specs`` are the tensors' partition specs, ``results`` those of the results with their whole shapes,
    ``mesh`` a mesh, its text, or None for the global one; a tensor may be None. Called for kernels, which no
    partitioner divides, where the user names a partition spec; without an answer every device computes all
    of it. Autograd is not involved.
    """


@hookspec(firstresult=True)
def xla_core_choose_shardings(step: StepToSplit) -> ShardingChoice | None:
    """How the inputs of ``step`` should be split over all devices; None leaves the decision to another extension.

    Called where the user leaves the choice (``use_spmd(auto=True)``), once for the first step that has products
    of parameters, and once more for the first that replaces parameters. Raise RuntimeError that says what to
    change where no way to split it is good enough to run.
    """


@hookspec(firstresult=True)
def xla_core_replicated_executable(
    executable: Executable, name: str, collectives: Sequence[object], backend: object
) -> Executable | None:
    """The executable that runs a program over all replicas in place of ``executable``; called once per program.

    ``name`` is the program's name in errors and reports, ``collectives`` are the trace's entries that communicate
    with other replicas, in order, and ``backend`` is this replica's device. The returned executable takes and
    returns buffers of this device alone.
    """


@hookspec
def xla_core_kept_in_step(trace: object) -> object:
    """The tensor that the extension keeps until the calling thread's step on ``trace`` ends, or None.

    The tensor has no meaning in later steps. Called when a step has been recorded for replay, which does not
    compute this tensor.
    """


@hookspec
def xla_core_cache_key_entries() -> Mapping[str, bytes] | None:
    """The extension's versions and settings that change compiled code, by unique entry name.

    The entries become part of each persistent cache key, so they are stable from run to run.
    """


@hookspec
def xla_core_subscribe(events: Events) -> None:
    """Subscribe to the core's events (steps, compilations, transfers, fallbacks): see ``contract.events``."""
