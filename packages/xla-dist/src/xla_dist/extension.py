"""What xla-core calls: the entry point ``dist`` of the group ``xla_core.extensions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xla_core import model_api
from xla_core.hookspecs import hookimpl
from xla_core.protocol import Executable
from xla_core.trace import Entry
from xla_dist import child, gradients, operators, replicated, vitals


@hookimpl
def xla_core_register_operators() -> None:
    """Register the collectives' lowering rules, and who reduces gradients."""
    operators.register()
    model_api.set_gradient_reducer(gradients.reduce_gradients)


@hookimpl
def xla_core_topology() -> None:
    """Leave the topology to others; from now on the runtime starts threads."""
    vitals.runtime_starts()


@hookimpl
def xla_core_client_started() -> None:
    """Look after the other processes of the job from now on."""
    vitals.runtime_started()
    child.attend()


@hookimpl
def xla_core_replicated_executable(
    executable: Executable, name: str, collectives: Sequence[Entry], backend: Any
) -> replicated.ReplicaExecutable:
    """Run programs over all replicas on this replica's buffers."""
    return replicated.replicated_executable(executable, name, collectives, backend)
