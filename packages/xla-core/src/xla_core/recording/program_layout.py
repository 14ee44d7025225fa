"""Where one program runs and how its values are split, as decided by its device's ``Backend.layout``.

There are three kinds of programs: on one device; on all replicas of a job at once, each with its own values
(``num_replicas``); and over a mesh as one program, with its values split over the devices
(``num_partitions``).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from xla_core.contract.device_protocol import ArraySpec, Placement
from xla_core.contract.foreign_values import AnyFunction
from xla_core.jax_bridge.passes.shardy_form import MeshOf
from xla_core.recording.entry import Operation

Function: TypeAlias = AnyFunction
Specs: TypeAlias = tuple[ArraySpec, ...]


def _as_it_is(function: Function, specs: Specs) -> tuple[Function, Specs]:
    return function, specs


def _from_nowhere(parameter: int, value: int) -> int:
    return 1


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The layout of one program.

    ``placement`` names the devices that run it: ``num_replicas`` times ``num_partitions`` of them. ``aliases``
    are the pairs of input and output that may share memory. ``inputs`` and ``outputs`` are HLO shardings, one per
    input (including lifted numbers) and output, or empty. None means the whole value on every device, or, for an
    output, the compiler's choice. ``mesh_of(texts)`` is the mesh for some HLO shardings, or None if there is none
    (``jax_private.lower``). The program is lowered inside ``lowering()``. ``edges(function, specs)`` returns the
    function to lower and its arguments' shapes, in case values enter and leave the program in another form than
    in the step. ``collectives`` are the operations that communicate with other replicas. ``gathered(parameter,
    value)`` takes numbers of values, and is the number of devices whose parts of the parameter each device needs
    to compute with its own part of the value; 1 where that is not known.
    """

    placement: Placement
    aliases: tuple[tuple[int, int], ...]
    num_replicas: int = 1
    num_partitions: int = 1
    inputs: tuple[str | None, ...] = ()
    outputs: tuple[str | None, ...] = ()
    mesh_of: MeshOf | None = None
    lowering: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    edges: Callable[[Function, Specs], tuple[Function, Specs]] = _as_it_is
    collectives: tuple[Operation, ...] = ()
    gathered: Callable[[int, int], int] = _from_nowhere

    def key_text(self) -> bytes:
        """The shardings, as part of the program's identity; empty where there are none."""
        if self.num_partitions == 1:
            return b""
        return f"\n{self.inputs} -> {self.outputs}".encode()

    def input_specs(self, specs: tuple[ArraySpec, ...]) -> tuple[ArraySpec, ...]:
        """``specs`` with the inputs' shardings."""
        return _with_shardings(specs, self.inputs)

    def output_specs(self, specs: tuple[ArraySpec, ...]) -> tuple[ArraySpec, ...]:
        """``specs`` with the outputs' shardings."""
        return _with_shardings(specs, self.outputs)


def _with_shardings(
    specs: tuple[ArraySpec, ...], shardings: tuple[str | None, ...]
) -> tuple[ArraySpec, ...]:
    if not shardings:
        return specs
    return tuple(
        dataclasses.replace(spec, sharding=sharding)
        for spec, sharding in zip(specs, shardings, strict=True)
    )
