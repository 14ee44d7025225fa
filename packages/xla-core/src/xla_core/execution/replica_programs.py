"""Programs over all replicas of a job: those with an operator that communicates with other replicas.

A program without such an operator runs on its device alone. A program with one runs on the devices of all
replicas at once, each with its own values: the same StableHLO with ``num_replicas`` above one.
"""

from __future__ import annotations

from collections.abc import Sequence

from xla_core.contract.device_protocol import Placement
from xla_core.lowering.replay import needed_entries
from xla_core.recording.entry import Entry, Operation, operations_of
from xla_core.recording.program_layout import Layout
from xla_core.recording.storage import Backend


def collective_entries(entries: Sequence[Entry], outputs: Sequence[int]) -> list[Operation]:
    """The operations in ``entries`` that ``outputs`` need and that communicate with other replicas."""
    if not any(operation.plan.needs_all_replicas for operation in operations_of(entries)):
        return []
    needed = operations_of(needed_entries(entries, outputs))
    return [operation for operation in needed if operation.plan.needs_all_replicas]


def layout_of(
    backend: Backend,
    entries: Sequence[Entry],
    outputs: Sequence[int],
    aliases: tuple[tuple[int, int], ...],
) -> Layout:
    """The layout of a program that is not partitioned: on the devices of all replicas, or on this device.

    It runs on all of them if ``backend`` has several and ``outputs`` need an operation in ``entries`` that
    communicates. ``aliases`` are kept unchanged.
    """
    collectives = tuple(collective_entries(entries, outputs))
    if not collectives or len(backend.replicas) < 2:
        return Layout(backend.placement, aliases, collectives=collectives)
    return Layout(
        Placement(backend.replicas),
        aliases,
        num_replicas=len(backend.replicas),
        collectives=collectives,
    )
