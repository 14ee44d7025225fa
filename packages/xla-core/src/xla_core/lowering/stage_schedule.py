"""The order in which the stages of a step run, and the registers that hold their arguments and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from xla_core.lowering.stage_partition import StagePlan


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One stage: the number of its executable, and the registers of its arguments and results.

    ``freed`` are the registers that no later stage reads.
    """

    executable: int
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    freed: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """The runs of a step over registers: first the arguments, then the constants, then the rest.

    ``constants`` are uint32 scalars; ``outputs`` are the registers of the step's results;
    ``aliases`` pairs arguments with the results that reuse their memory; ``nbytes`` is the size
    of each register's value.
    """

    arguments: int
    constants: tuple[int, ...]
    runs: tuple[Run, ...]
    outputs: tuple[int, ...]
    aliases: tuple[tuple[int, int], ...]
    nbytes: tuple[int, ...]


def schedule(
    plan: StagePlan,
    inputs: Sequence[int],
    outputs: Sequence[int],
    aliases: tuple[tuple[int, int], ...],
    nbytes: Callable[[int], int],
) -> Schedule:
    """The schedule of ``plan``'s stages.

    ``inputs`` are the numbers of the step's inputs in the order of its arguments, ``outputs`` those of its
    results, ``aliases`` the pairs of their positions that share memory. ``nbytes`` returns the size of the value
    with a number.
    """
    registers = {value: i for i, value in enumerate(inputs)}
    sizes = [nbytes(value) for value in inputs]
    constants = tuple(dict.fromkeys(i for stage in plan.stages for i in stage.indices))
    place = {index: len(inputs) + i for i, index in enumerate(constants)}
    sizes += [np.dtype(np.uint32).itemsize] * len(constants)
    runs = []
    for stage in plan.stages:
        arguments = (*(registers[v] for v in stage.inputs), *(place[i] for i in stage.indices))
        for value in stage.outputs:
            registers[value] = len(sizes)
            sizes.append(nbytes(value))
        runs.append(Run(stage.program, arguments, tuple(registers[v] for v in stage.outputs), ()))
    kept = {registers[v] for v in outputs} | set(place.values())
    return Schedule(
        len(inputs),
        constants,
        tuple(_with_frees(runs, kept)),
        tuple(registers[v] for v in outputs),
        aliases,
        tuple(sizes),
    )


def _with_frees(runs: Sequence[Run], kept: set[int]) -> list[Run]:
    seen = set(kept)
    complete = []
    for run in reversed(runs):
        freed = {r for r in (*run.arguments, *run.results) if r not in seen}
        seen |= freed
        complete.append(dataclasses.replace(run, freed=tuple(sorted(freed))))
    complete.reverse()
    return complete
