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
from xla_plan.steps.candidate import Candidate, Mesh

MSG_NO_MESH: Final = "no mesh of {axes} over {topology}: {reason}"
_TRIES: Final = 3
_OF_BATCH: Final = ("data", "fsdp")
"""The axes that split the batch: it is in as many parts on meshes whose other axes are equal."""
_GATHERS: Final = 2
"""How often a split parameter is gathered: for the forward and for the backward pass."""
_HALF: Final = 2
"""Bytes of an element of gathered parameters and of activations, as steps compute in bfloat16."""


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
    """Compile the most promising meshes of ``axes`` over all chips of ``topology``, until ``compiled`` (3) fit.

    At most three times as many are compiled. ``step`` names a step function that takes a mesh with any of the axes,
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

    return Found(sorted(compile_best(guesses, compiled, compile_one), key=_rank), guesses)


def compile_best(
    guesses: Sequence[Guess], wanted: int, compile_one: Callable[[Candidate], Plan]
) -> list[Plan]:
    """Compile ``guesses``, the first one first, until ``wanted`` fit, or three times as many are compiled.

    What activations need is known only then: after a mesh that does not fit, those that need more are left out.
    """
    compiled: list[Plan] = []
    waiting = [g for g in guesses if not g.out]
    while waiting and sum(p.fits for p in compiled) < wanted and len(compiled) < _TRIES * wanted:
        tried = waiting.pop(0)
        plan = compile_one(tried.candidate)
        compiled.append(plan)
        if plan.memory["total"] > plan.limit:
            waiting = [g for g in waiting if not _needs_more(g, tried)]
    return compiled


def _needs_more(guess: Guess, other: Guess) -> bool:
    """Whether a mesh splits activations as ``other`` does, and holds as many bytes of parameters, or more."""
    along, others = (
        {axis: n for axis, n in g.candidate.mesh if axis not in _OF_BATCH} for g in (guess, other)
    )
    return along == others and guess.held >= other.held


def _promise(guess: Guess) -> tuple[bool, float, int]:
    """A sort key: guesses that are not out come first, then the fastest, then those that hold the fewest bytes.

    Copies along ``data`` send as many bytes as parts along a longer ``fsdp``, but leave less room for activations.
    """
    return bool(guess.out), float(f"{guess.seconds:.3g}"), guess.held


def _rank(plan: Plan) -> tuple[bool, float]:
    """A sort key: plans that fit come first, then those that do more of the model's work per second."""
    if plan.estimate is None:
        return True, math.inf
    work = plan.figures.get("model_flops") or 1.0
    return not plan.fits, plan.estimate.seconds / work


def devices_of(topology: str) -> int:
    """The number of chips of a topology such as ``v5e:4x4*2`` or ``v5litepod-16``."""
    name, _, slices = topology.partition("*")
    count = int(slices or 1)
    if ":" in name:
        return count * math.prod(int(n) for n in name.partition(":")[2].split("x"))
    generation, _, number = name.rpartition("-")
    # names such as v4-8 and v5p-8 count cores, and a chip has two
    return count * int(number) // (2 if generation in ("v2", "v3", "v4", "v5p") else 1)


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
    parts = row["parts"]
    held = parts["parameters"] + parts["optimizer state"] + parts["gradients"]
    devices = math.prod(size for _, size in candidate.mesh)
    peak = chip.flops / chip.devices
    flops = row["model_flops"] or 0.0
    sent = _sent(row, candidate, flops)
    seconds = flops / devices / peak + sent / (chip.ici / chip.devices)
    out = ""
    if held > limit:
        out = f"parameters, their state and gradients alone are {held / limit:.0%} of HBM"
    # per FLOP, as the step's batch may differ between meshes
    return Guess(candidate, held, seconds / flops if flops else seconds, out)


def _sent(row: Mapping[str, JsonValue], candidate: Candidate, flops: float) -> float:
    """The bytes that a chip sends in a step, from the shapes of parameters and of their parts.

    Along ``data`` parameters are copied, and the gradients of the copies are summed. Along ``fsdp`` they are split,
    and gathered for each pass. Along ``tensor`` activations are summed: for each split weight, once in one of the
    two passes, with the size of its unsplit side.
    """
    sizes = dict(candidate.mesh)
    tensor, copies = sizes.get("tensor", 1), sizes.get("data", 1)
    devices = math.prod(sizes.values())
    parameters = sum(math.prod(whole) for whole, _ in row["parameters"]) or 1
    tokens = flops / (6 * parameters) / (devices // tensor)
    sent = 0.0
    for whole, part in row["parameters"]:
        gathered = math.prod(whole) / tensor if _split(whole, part) else math.prod(whole)
        pieces = max(1.0, gathered / math.prod(part))
        sent += (_GATHERS * _HALF + 4) * gathered * (1 - 1 / pieces)
        sent += 2 * 4 * math.prod(part) * (1 - 1 / copies)
        if tensor > 1 and len(whole) >= 2 and _split(whole, part):
            layers = math.prod(whole[:-2])
            sent += layers * 2 * _HALF * tokens * min(whole[-2:]) * (1 - 1 / tensor)
    return sent


def _split(whole: Sequence[int], part: Sequence[int]) -> bool:
    return list(whole) != list(part)
