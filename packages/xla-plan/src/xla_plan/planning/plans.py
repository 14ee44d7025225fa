"""Plans: measures candidates one after the other, each in a process of its own."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from xla_core.contract.foreign_values import JsonObject, JsonValue
from xla_core.support import forked_programs
from xla_plan.planning import depths
from xla_plan.planning.chips import chip_of
from xla_plan.planning.estimate import Estimate, advice, estimate
from xla_plan.steps.candidate import Candidate

# The environment of the process that measures: it compiles for TPUs, programs contain the user's lines, and values
# that a script reads are zeros.
_ENVIRONMENT: Final = {"PJRT_DEVICE": "TPU", "XLA_HLO_DEBUG": "1", "XLA_AOT_READS": "zeros"}
# libtpu 0.0.42's messages for a program that is too large, with the size of its temporaries, or of everything.
_TOO_LARGE: Final = re.compile(
    r"(?:temporaries \(|Used )(?P<used>[\d.]+)(?P<of>[KMGT])\)?(?: exceeds available HBM \(| of )"
    r"(?P<limit>[\d.]+)(?P<unit>[KMGT])"
)
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_WORKER: Final = """
import sys
from xla_plan.steps import worker
sys.exit(worker.main(*{arguments!r}))
"""
MSG_DIED: Final = (
    "the process that compiled it ended with status {status} and without a result: {tail}"
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One candidate with its figures, or with an ``error`` if its step or the compiler failed.

    ``memory`` is bytes on one chip by kind, with their ``total``; ``limit`` is the chip's memory in bytes.
    ``scaled`` describes the extrapolation if fewer layers were compiled.
    """

    candidate: Candidate
    figures: Mapping[str, JsonValue]
    memory: Mapping[str, int]
    limit: int
    estimate: Estimate | None
    advice: Sequence[str]
    error: str = ""
    scaled: str = ""

    @property
    def fits(self) -> bool:
        """Whether the step fits into one chip's memory."""
        return not self.error and self.memory["total"] <= self.limit

    def as_json(self) -> JsonObject:
        """All fields, and ``fits``, as plain values."""
        fields = dataclasses.asdict(self)
        fields["fits"] = self.fits
        return fields


def plan(
    step: str,
    candidates: Iterable[Candidate],
    *,
    cache: Path | None = None,
    arguments: Sequence[str] = (),
    timeout: float | None = None,
    depth: depths.Depth | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Plan]:
    """Measure every candidate of ``step`` (``module:function``, ``file.py:function``, or a script).

    ``cache`` (default: none) is a folder that keeps the compiled programs, for hosts with such chips. ``arguments``
    are those of a script. ``timeout`` is the limit of one compilation in seconds (default: none). With ``depth``,
    fewer layers are compiled and the figures extrapolated. ``tell`` is called with lines of progress.
    """
    return [
        _scaled(step, c, depth, cache, timeout, tell)
        if depth
        else plan_of(c, run_worker(step, c, cache, arguments, timeout, tell))
        for c in candidates
    ]


def _scaled(
    step: str,
    candidate: Candidate,
    depth: depths.Depth,
    cache: Path | None,
    timeout: float | None,
    tell: Callable[[str], None],
) -> Plan:
    measured = []
    for layers in depth.compiled:
        one = candidate.with_options(**{depth.option: layers})
        figures = run_worker(step, one, cache, (), timeout, tell)
        if "error" in figures:
            return plan_of(one, figures)
        measured.append(figures)
    whole = candidate.with_options(**{depth.option: depth.whole})
    return dataclasses.replace(plan_of(whole, depth.extend(measured)), scaled=depth.text)


def run_worker(
    step: str,
    candidate: Candidate,
    cache: Path | None,
    arguments: Sequence[str],
    timeout: float | None,
    tell: Callable[[str], None],
) -> JsonObject:
    """The figures of one candidate, from a process of its own; or only an ``error`` if it has none."""
    began = time.monotonic()
    request = {
        "step": step, "topology": candidate.topology, "mesh": candidate.mesh,
        "options": dict(candidate.options), "arguments": list(arguments),
    }  # fmt: skip
    tell(f"compiling {candidate.title}")
    figures = ask_worker(request, cache, timeout)
    tell(
        f"{candidate.title}: {figures.get('error', 'compiled')[:300]} ({time.monotonic() - began:.0f} s)"
    )
    return figures


def ask_worker(
    request: Mapping[str, JsonValue], cache: Path | None, timeout: float | None
) -> JsonObject:
    """The answer of a process of its own to a request (see ``worker``)."""
    environment = {**os.environ, **_ENVIRONMENT, "XLA_AOT_TOPOLOGY": request["topology"]}
    if cache is not None:
        environment["XLA_PERSISTENT_CACHE_PATH"] = str(cache.resolve())
    with tempfile.TemporaryDirectory() as folder:
        question, result = (Path(folder) / name for name in ("request", "result"))
        question.write_text(json.dumps(request))
        code = _WORKER.format(arguments=(str(question), str(result)))
        status: int | str
        try:
            done = _server().run(
                code, cwd=str(Path.cwd()), environment=environment, timeout=timeout
            )
            status, log = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as expired:
            status, log = (
                f"(stopped after {timeout:.0f} s)",
                str(expired.stdout) + str(expired.stderr),
            )
        except ChildProcessError as error:
            _server.cache_clear()  # the next candidate gets a new one
            return {"error": str(error)}
        if result.is_file():
            answer: dict[str, object] = json.loads(result.read_text())
        else:
            tail = " ".join(log.split()[-60:])
            answer = {"error": MSG_DIED.format(status=status, tail=tail)}
    return answer


@functools.cache
def _server() -> forked_programs.Server:
    """The process that the workers are forked from: what they all import is imported once."""
    server = forked_programs.Server(hash_seed=0)
    atexit.register(server.close)
    return server


def plan_of(candidate: Candidate, figures: Mapping[str, JsonValue]) -> Plan:
    """The plan for measured figures, or for their ``error``."""
    chip = chip_of(candidate.topology)
    if "error" in figures:
        return _refused(candidate, figures)
    memory = memory_by_kind(figures)
    estimated = estimate(figures, chip)
    limit = figures["limit"] or chip.hbm_bytes
    return Plan(candidate, figures, memory, limit, estimated, advice(memory, limit, estimated))


def _refused(candidate: Candidate, figures: Mapping[str, JsonValue]) -> Plan:
    """The plan of a candidate that failed; with the size that the compiler reports if the program is too large."""
    memory, limit, hints = {"total": 0}, chip_of(candidate.topology).hbm_bytes, []
    large = _TOO_LARGE.search(figures["error"])
    if large:
        memory = {"total": int(float(large["used"]) * _UNITS[large["of"]])}
        limit = int(float(large["limit"]) * _UNITS[large["unit"]])
        memory["temporaries"] = memory["total"]
        hints = advice(memory, limit, None)
    return Plan(candidate, figures, memory, limit, None, hints, error=figures["error"])


def memory_by_kind(figures: Mapping[str, JsonValue]) -> dict[str, int]:
    """Bytes on one chip: parameters, optimizer state, other inputs, results, temporaries, code, and their total.

    The temporaries consist of ``gradients`` and ``activations``: as many bytes as all gradients have are counted as
    ``gradients``, and the rest as ``activations``. ``padding`` is what layouts add to parameters and state.
    """
    compiled, parts = figures["memory"], figures.get("parts") or {}
    parameters, state = parts.get("parameters", 0), parts.get("optimizer state", 0)
    gradients = min(parts.get("gradients", 0), compiled["temporaries"])
    kinds = {
        "parameters": parameters,
        "optimizer state": state,
        "inputs and padding": max(0, compiled["arguments"] - parameters - state),
        "results": compiled["outputs"] - compiled["aliased"],
        "gradients": gradients,
        "activations": compiled["temporaries"] - gradients,
        "code": compiled["code"],
    }
    return {**kinds, "temporaries": compiled["temporaries"], "total": sum(kinds.values())}
