"""Searches for a mesh: ranks all layouts of a topology's chips by arithmetic, and compiles the best."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from xla_core.contract.foreign_values import JsonValue
from xla_plan.planning import plans
from xla_plan.planning.chips import Chip, chip_of
from xla_plan.planning.plans import Plan
from xla_plan.planning.traffic import Weight, padding, sent
from xla_plan.steps.candidate import Candidate, Mesh

MSG_MICROBATCHES: Final = (
    "a pipeline over the axis stage needs --set microbatches=N, an option of the step function"
)
MSG_NO_MESH: Final = "no mesh of {axes} over {topology}: {reason}"
_TRIES: Final = 3
_OF_BATCH: Final = ("data", "fsdp")
"""The axes that split the batch everywhere: meshes whose other axes are equal are of one kind."""


@dataclasses.dataclass(frozen=True)
class Guess:
    """One mesh by arithmetic: the bytes ``held`` by a chip at least, ``seconds`` per FLOP, or why it is out.

    ``seconds`` are those of a step if its FLOPs are unknown.
    """

    candidate: Candidate
    held: int
    seconds: float
    out: str = ""


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search: the compiled plans, best first, and the guesses for all meshes."""

    plans: Sequence[Plan]
    guesses: Sequence[Guess]


def search(
    step: str,
    topology: str,
    axes: Sequence[str],
    options: Mapping[str, object],
    *,
    compiled: int = 3,
    cache: Path | None = None,
    timeout: float | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Found:
    """Compile the most promising meshes of ``axes`` over all chips of ``topology``.

    ``compiled`` (3) kinds of them, which differ in more than the batch, and up to three of a kind
    (``compile_best``). ``step`` names a step function that takes a mesh with any of the axes,
    ``options`` are its keyword arguments. ``cache``, ``timeout`` and ``tell`` are those of ``plans.plan``. Raises
    ValueError if no mesh is possible.
    """
    chip = chip_of(topology)
    devices = devices_of(topology) * chip.devices
    meshes = list(layouts(devices, axes))
    tell(f"{len(meshes)} meshes of {devices} devices along {', '.join(axes)}")
    request = {"step": step, "topology": topology, "options": dict(options), "meshes": meshes}
    answer = plans.ask_worker(request, None, timeout)
    if "error" in answer:
        raise ValueError(
            MSG_NO_MESH.format(axes=", ".join(axes), topology=topology, reason=answer["error"])
        )
    limit = answer["limit"] or chip.hbm_bytes
    guesses = [
        guess(Candidate(topology, mesh, options), row, chip, limit)
        for mesh, row in zip(meshes, answer["rows"], strict=True)
    ]
    guesses.sort(key=_promise)
    if guesses[0].out:
        raise ValueError(
            MSG_NO_MESH.format(axes=", ".join(axes), topology=topology, reason=guesses[0].out)
        )

    def compile_one(candidate: Candidate) -> Plan:
        (plan,) = plans.plan(step, [candidate], cache=cache, timeout=timeout, tell=tell)
        return plan

    return Found(sorted(compile_best(guesses, compiled, compile_one), key=rank), guesses)


def compile_best(
    guesses: Sequence[Guess], wanted: int, compile_one: Callable[[Candidate], Plan]
) -> list[Plan]:
    """Compile the most promising of ``guesses``, which are in order, and different ones rather than similar ones.

    Meshes are of one kind if they split activations in the same way, apart from the batch. The best of each kind
    are compiled until ``wanted`` kinds have one that fits, or three times as many are compiled. Then the next one
    of each of these kinds: the arithmetic cannot tell what more copies along ``data`` save. Then one more of the
    kind with the best plan.
    """
    kinds: dict[Mesh, list[Guess]] = {}
    for one in guesses:
        if not one.out:
            kinds.setdefault(_kind(one), []).append(one)
    compiled: list[Plan] = []
    fitting: dict[Mesh, list[Plan]] = {}

    def compile_next(kind: Mesh) -> None:
        plan = _compile_first(kinds[kind], compile_one)
        compiled.append(plan)
        if plan.fits:
            fitting.setdefault(kind, []).append(plan)

    for kind, waiting in kinds.items():
        while waiting and kind not in fitting and len(compiled) < _TRIES * wanted:
            compile_next(kind)
        if len(fitting) == wanted:
            break
    for kind in list(fitting):
        if kinds[kind]:
            compile_next(kind)
    if fitting:
        best = min(fitting, key=lambda kind: min(map(rank, fitting[kind])))
        if kinds[best]:
            compile_next(best)
    return compiled


def _compile_first(waiting: list[Guess], compile_one: Callable[[Candidate], Plan]) -> Plan:
    """Compile the first of the guesses of one kind, and remove it; if it is too large, all that hold as much."""
    tried = waiting.pop(0)
    plan = compile_one(tried.candidate)
    if plan.memory["total"] > plan.limit:
        waiting[:] = [g for g in waiting if g.held < tried.held]
    return plan


def _kind(guess: Guess) -> Mesh:
    """How a mesh splits activations, apart from the batch."""
    return tuple((axis, size) for axis, size in guess.candidate.mesh if axis not in _OF_BATCH)


def _promise(guess: Guess) -> tuple[bool, float, int]:
    """A sort key: guesses that are not out come first, then the fastest, then those that hold the fewest bytes.

    Copies along ``data`` send as many bytes as parts along a longer ``fsdp``, but leave less room for activations.
    """
    return bool(guess.out), float(f"{guess.seconds:.3g}"), guess.held


def rank(plan: Plan) -> tuple[bool, float]:
    """A sort key: plans that fit come first, then those that do more of the model's work per second."""
    if plan.estimate is None:
        return True, math.inf
    work = plan.figures.get("model_flops") or 1.0
    return not plan.fits, plan.estimate.seconds / work


def devices_of(topology: str) -> int:
    """The number of chips of a topology such as ``v5e:4x4*2`` or ``v5litepod-16``."""
    name, count = topology.partition("*")[0], slices_of(topology)
    if ":" in name:
        return count * math.prod(int(n) for n in name.partition(":")[2].split("x"))
    generation, _, number = name.rpartition("-")
    # names such as v4-8 and v5p-8 count cores, and a chip has two
    return count * int(number) // (2 if generation in ("v2", "v3", "v4", "v5p") else 1)


def slices_of(topology: str) -> int:
    """The number of slices of a topology: 2 of ``v5e:4x4*2``."""
    return int(topology.partition("*")[2] or 1)


def layouts(devices: int, axes: Sequence[str]) -> Iterator[Mesh]:
    """All meshes of ``axes`` whose sizes multiply to ``devices``; axes of size 1 are left out."""
    if not axes:
        if devices == 1:
            yield ()
        return
    for size in (n for n in range(1, devices + 1) if devices % n == 0):
        for rest in layouts(devices // size, axes[1:]):
            yield (((axes[0], size),) if size > 1 else ()) + rest


def guess(candidate: Candidate, row: Mapping[str, JsonValue], chip: Chip, limit: int) -> Guess:
    """The guess for one mesh, from its ``row`` of ``measure.shapes``."""
    if "error" in row:
        return Guess(candidate, 0, math.inf, row["error"])
    parts, sizes = row["parts"], dict(candidate.mesh)
    held = parts["parameters"] + parts["optimizer state"] + parts["gradients"]
    weights = [Weight(whole, part, axes) for whole, part, axes in row["parameters"]]
    flops = row["model_flops"] or 0.0
    stages, microbatches = sizes.get("stage", 1), candidate.options.get("microbatches")
    iterations, busy = 1, 1
    if stages > 1:
        if not isinstance(microbatches, int):
            return Guess(candidate, held, math.inf, MSG_MICROBATCHES)
        # in the first and last of them, some stages have nothing to compute
        iterations, busy = microbatches + stages - 1, microbatches
    computed = flops * row["padding"] * padding(weights, sizes) * iterations / busy
    peak = chip.flops / chip.devices
    traffic = sent(weights, candidate.mesh, slices_of(candidate.topology), flops, iterations)
    within = traffic.ici / (chip.ici / chip.devices)
    # as in ``estimate``: what goes to other slices goes there meanwhile
    between = traffic.dcn / (chip.dcn / chip.devices)
    seconds = max(computed / math.prod(sizes.values()) / peak + within, between)
    out = ""
    if held > limit:
        out = f"parameters, their state and gradients alone are {held / limit:.0%} of HBM"
    # per FLOP, as the step's batch may differ between meshes
    return Guess(candidate, held, seconds / flops if flops else seconds, out)
