"""``xr.use_spmd(auto=True)``: chooses the split of a recorded step whose compiled program is estimated fastest."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from xla_core.contract.foreign_values import JsonObject
from xla_core.contract.step_sharding import (
    PARAMETER,
    STATE,
    PartitionSpec,
    ShardingChoice,
    StepInput,
    StepToSplit,
)
from xla_plan.compiled.figures import figures_of
from xla_plan.planning.chips import NOMINAL, Chip, chip_of_kind
from xla_plan.planning.estimate import advice, estimate
from xla_plan.planning.search import Guess, guess, layouts
from xla_plan.planning.splits import AXES, Split, axes_of, batch_of, part_of, splits
from xla_plan.steps.candidate import Candidate

COMPILED: Final = 4
"""The number of splits that are compiled, the best ones by arithmetic."""
MSG_NO_SPLIT: Final = (
    "automatic sharding found nothing to split over {devices} devices: the first dimension of the step's data is "
    "{batch}, and no side of a parameter of 64 KiB or more divides. Give a batch that {devices} or a divisor of it "
    "divides, or call xr.use_spmd() without auto and xs.mark_sharding()"
)
MSG_NOTHING_FITS: Final = (
    "automatic sharding: none of {count} splits over {devices} devices fits. The best one, {title}: {reason}. "
    "Use more devices, fewer sequences in a step, torch.utils.checkpoint for the layers, or bfloat16 for the "
    "optimizer's state"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """A split whose program was compiled: its bytes on one device and seconds of a step, or why it is ``out``."""

    split: Split
    total: int
    seconds: float
    out: str = ""


def choose(step: StepToSplit) -> ShardingChoice:
    """The split that fits and has the shortest estimated step time, with a report.

    Raises RuntimeError, which says what to change, if nothing can be split or nothing fits.
    """
    chip = chip_of_kind(step.kind)
    limit = step.limit or chip.hbm_bytes
    possible = list(splits(step.inputs, list(layouts(step.devices, AXES))))
    if not possible:
        raise RuntimeError(MSG_NO_SPLIT.format(devices=step.devices, batch=batch_of(step.inputs)))
    guesses = sorted(
        ((_guessed(step, split, chip, limit), split) for split in possible),
        key=lambda pair: (bool(pair[0].out), pair[0].seconds),
    )
    trials: list[Trial] = []
    for one, split in guesses:
        if one.out or sum(not t.out for t in trials) == COMPILED or len(trials) == 2 * COMPILED:
            break
        trials.append(_tried(step, split, chip, limit))
    trials.sort(key=lambda t: (bool(t.out), t.seconds))
    if not trials or trials[0].out:
        best = trials[0].split if trials else guesses[0][1]
        reason = trials[0].out if trials else guesses[0][0].out
        raise RuntimeError(
            MSG_NOTHING_FITS.format(
                count=len(possible), devices=step.devices, title=best.title, reason=reason
            )
        )
    best = trials[0].split
    return ShardingChoice(best.axes, best.specs, _report(step, trials, len(possible), chip))


def _guessed(step: StepToSplit, split: Split, chip: Chip, limit: int) -> Guess:
    """The guess for a split by arithmetic, as in ``search``."""
    sizes = dict(split.axes)
    parts: collections.Counter[str] = collections.Counter()
    parameters = []
    for one, spec in zip(step.inputs, split.specs, strict=True):
        part = part_of(one.shape, spec, sizes)
        if one.role in (PARAMETER, STATE):
            parts[one.role] += math.prod(part) * one.itemsize
        if one.role == PARAMETER:
            axes = [axes_of(entry) for entry in spec or [None] * len(one.shape)]
            parameters.append((list(one.shape), part, axes))
    row: JsonObject = {
        "parts": {
            "parameters": parts[PARAMETER],
            "optimizer state": parts[STATE],
            "gradients": parts[PARAMETER] if parts[STATE] else 0,
        },
        "parameters": parameters,
        "model_flops": step.flops,
        "padding": 1.0,  # only batches that divide are split
    }
    return guess(Candidate(step.kind, split.axes), row, chip, limit)


def _tried(step: StepToSplit, split: Split, chip: Chip, limit: int) -> Trial:
    try:
        executable = step.compiled(split.axes, split.specs)
    except RuntimeError as error:  # for example the compiler refuses a program that is too large
        return Trial(split, 0, math.inf, " ".join(str(error).split())[:300])
    figures = figures_of(executable, step.devices)
    memory = figures["memory"]
    total = sum(memory[k] for k in ("arguments", "outputs", "temporaries", "code"))
    total -= memory["aliased"]
    seconds = estimate(figures, chip).seconds
    if total > limit:
        kinds = {"total": total, "temporaries": memory["temporaries"]}
        return Trial(split, total, seconds, advice(kinds, limit, None)[0])
    return Trial(split, total, seconds)


def _report(step: StepToSplit, trials: Sequence[Trial], possible: int, chip: Chip) -> str:
    best = trials[0]
    nominal = " (at nominal rates)" if chip is NOMINAL else ""
    lines = [
        f"automatic sharding over {step.devices} devices ({step.kind}): {best.split.title}; {possible} splits, "
        f"{len(trials)} compiled"
    ]
    lines += [
        f"  {trial.split.title}: "
        + (
            trial.out
            or f"{trial.total / 2**20:.1f} MiB a device, {trial.seconds * 1e3:.3g} ms a step{nominal}"
        )
        for trial in trials
    ]
    return "\n".join(lines + _grouped(step.inputs, best.split.specs))


def _grouped(inputs: Sequence[StepInput], specs: Sequence[PartitionSpec | None]) -> list[str]:
    """A line for all inputs of one role, shape and spec, with the name of the first."""
    groups: dict[tuple[str, tuple[int, ...], PartitionSpec], list[str]] = {}
    for one, spec in zip(inputs, specs, strict=True):
        if spec is not None:
            groups.setdefault((one.role, one.shape, spec), []).append(one.name)
    return [
        f"  {len(names)} x {role} {list(shape)} as {spec}: {names[0]}{', ...' if len(names) > 1 else ''}"
        for (role, shape, spec), names in groups.items()
    ]
