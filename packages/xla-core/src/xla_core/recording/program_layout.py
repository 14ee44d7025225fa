"""Where one program runs and how its values are split: decided by its device's ``Backend.layout``.

Three kinds of programs: on one device; on all replicas of a job at once, each with values of its own
(``num_replicas``); over a mesh as one program, its values split over the devices
(``num_partitions``).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

from xla_core.contract.device_protocol import ArraySpec, Placement

Function: TypeAlias = Callable[..., Any]
Specs: TypeAlias = tuple[ArraySpec, ...]


def _as_it_is(function: Function, specs: Specs) -> tuple[Function, Specs]:
    return function, specs


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The layout of one program.

    ``placement`` says which devices run it: ``num_replicas`` times ``num_partitions`` of them. ``aliases`` are
    the pairs of input and output that may share memory. ``inputs`` and ``outputs`` are HLO shardings, one per
    input (lifted numbers included) and output, or empty: None is the whole value on every device, for an output
    the compiler's choice. ``input_annotations`` and ``output_annotations`` say the same in the form that the
    program is annotated in (``jax_private.lower``). The program is lowered inside ``lowering()``;
    ``edges(function, specs)`` are the function that is lowered and its arguments' shapes, where values enter
    and leave it otherwise than the step has them. ``collectives`` are the operations that talk to other
    replicas.
    """

    placement: Placement
    aliases: tuple[tuple[int, int], ...]
    num_replicas: int = 1
    num_partitions: int = 1
    inputs: tuple[str | None, ...] = ()
    outputs: tuple[str | None, ...] = ()
    input_annotations: tuple[str | None, ...] = ()
    output_annotations: tuple[str | None, ...] = ()
    lowering: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    edges: Callable[[Function, Specs], tuple[Function, Specs]] = _as_it_is
    collectives: tuple[Any, ...] = ()

    def key_text(self) -> bytes:
        """The shardings, as part of the program's identity; empty where there are none."""
        if self.num_partitions == 1:
            return b""
        return f"\n{self.input_annotations} -> {self.output_annotations}".encode()

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
