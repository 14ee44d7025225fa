"""What a new program costs: CPU seconds and wall time of work whose every shape is new.

``python benchmarks/new_programs.py`` measures this project's ``xla`` device and plain jax; with
``TORCH_XLA_PYTHON`` naming an interpreter that has the official torch_xla, that too. Each system is one process
(``new_work.py``), and they take turns, a round of a few calls each, in alternating order. The time of a
call contains recording, lowering, compiling, the first run and reading its result; it is per call, and a
call is one program where ``programs`` says 1. Nothing is cached between runs. Figures are medians over
the rounds. The exit status is 1 if a system fails, or computes other values than PyTorch's CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from run import interpreters

HERE: Final = Path(__file__).resolve().parent
COUNTS: Final = {
    "operator": 10, "chain": 5, "linear": 5, "transformer": 2, "resnet18": 1, "generation": 4,
}  # fmt: skip
"""The kinds of work, and calls of each in a round."""
COMPARED: Final = {"jax": ("operator", "chain", "linear")}
"""Kinds whose values are held against the CPU's, for systems whose models have other parameters."""
TOLERANCE: Final = 2e-3
"""Relative; sums of float32 in another order."""

Figures = dict[str, Any]


class Worker:
    """A running ``new_work.py``."""

    def __init__(self, system: str, python: str) -> None:
        self.system = system
        # no program of an earlier run is there
        environment = {k: v for k, v in os.environ.items() if "PERSISTENT_CACHE" not in k}
        self._process = subprocess.Popen(
            [python, str(HERE / "new_work.py"), system],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # every call is to be a new program
            env={
                "PJRT_DEVICE": "CPU",
                "JAX_PLATFORMS": "cpu",
                "XLA_VARYING_SHAPES": "0",
                **environment,
            },
        )
        self._answer()

    def _answer(self) -> Figures:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.system} ended early (status {self._process.wait()})")
        found: Figures = json.loads(line)
        return found

    def calls(self, kind: str, first: int, count: int) -> Figures:
        """Calls numbered from ``first``: seconds of all, programs, values."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {first} {count}\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        """Let the process end."""
        self._process.communicate()


def measure(workers: Sequence[Worker], kind: str, rounds: int) -> dict[str, Figures]:
    """Figures of each system on one kind of work. The first round warms up, and counts nowhere."""
    count = COUNTS[kind]
    taken: dict[str, list[Figures]] = {worker.system: [] for worker in workers}
    for number in range(rounds + 1):
        for worker in workers if number % 2 else reversed(workers):
            taken[worker.system].append(worker.calls(kind, 1 + number * count, count))
    return {system: _summed(found, count) for system, found in taken.items()}


def _summed(found: Sequence[Figures], count: int) -> Figures:
    rounds = found[1:]
    return {
        "cpu_ms": statistics.median(f["cpu_s"] for f in rounds) / count * 1e3,
        "wall_ms": statistics.median(f["wall_s"] for f in rounds) / count * 1e3,
        "first_ms": found[0]["wall_s"] / count * 1e3,
        "programs": sum(f["programs"] for f in rounds) / len(rounds) / count,
        "rounds": [{k: v for k, v in f.items() if k != "values"} for f in rounds],
        "values": [value for f in found for value in f["values"]],
    }


def disagreements(results: Mapping[str, Mapping[str, Figures]]) -> list[str]:
    """Where a system computed other values than PyTorch's CPU."""
    found = []
    for kind, by_system in results.items():
        expected = by_system["cpu"]["values"]
        for system, figures in by_system.items():
            if kind not in COMPARED.get(system, tuple(COUNTS)):
                continue
            pairs = zip(figures["values"], expected, strict=True)
            # sums that cancel are compared by their terms' size, about 1
            if not all(math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for a, b in pairs):
                found.append(f"{system} differs from the CPU on {kind}")
    return found


def table(results: Mapping[str, Mapping[str, Figures]]) -> str:
    """The figures, and the ratios of the CPU time to the other systems'."""
    lines = [f"{'':12} {'system':10} {'CPU ms':>8} {'wall ms':>8} {'programs':>9} {'xla / it':>9}"]
    for kind, by_system in results.items():
        for system, f in by_system.items():
            if system != "cpu":
                ratio = by_system["xla"]["cpu_ms"] / f["cpu_ms"] if "xla" in by_system else math.nan
                lines.append(
                    f"{kind:12} {system:10} {f['cpu_ms']:8.1f} {f['wall_ms']:8.1f} "
                    f"{f['programs']:9.2f} {ratio:9.2f}"
                )
    return "\n".join(lines)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", action="append", choices=COUNTS, default=[])
    parser.add_argument(
        "--system", action="append", choices=("xla", "torch_xla", "jax"), default=[]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write every round")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if values differ."""
    options = parse_arguments(argv)
    peer = os.environ.get("TORCH_XLA_PYTHON")
    usual = [s for s in ("xla", "torch_xla", "jax") if peer or s != "torch_xla"]
    pythons = interpreters(list(dict.fromkeys(["cpu", *(options.system or usual)])))
    workers = [Worker(system, python) for system, python in pythons.items()]
    kinds = options.kind or list(COUNTS)
    results = {kind: measure(workers, kind, options.rounds) for kind in kinds}
    for worker in workers:
        worker.end()
    print(table(results))
    faults = disagreements(results)
    print(*faults, sep="\n", file=sys.stderr)
    if options.json:
        machine = {"cores": os.cpu_count(), "python": platform.python_version()}
        written = {"taken": time.strftime("%Y-%m-%d"), "machine": machine, "kinds": results}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
