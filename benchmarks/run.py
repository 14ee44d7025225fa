"""Measures whole training steps and compares systems: prints tables, writes a JSON file.

``python benchmarks/run.py`` measures every workload on this project's ``xla`` device and on
PyTorch's eager CPU; with ``TORCH_XLA_PYTHON`` naming an interpreter that has the official torch_xla
(and the torch it was built for), on that too. Every (workload, system) pair is a process of its
own; rounds go round the systems (A B C, C B A, ...), so that whatever else the machine does meets
all of them. Figures are medians over the rounds. Two processes that do the same may differ by a
tenth over all their rounds, however many: ``--processes`` measures several of each system, and the
figures are then medians over the processes' medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from systems import ENVIRONMENTS, SYSTEMS
from tables import print_tables
from workloads import ALL_WORKLOADS, DEPTH_WORKLOADS, WORKLOADS

HERE: Final = Path(__file__).resolve().parent
ROUND_FIGURES: Final = (
    "trace_ms",
    "sync_ms",
    "step_ms",
    "busy_ms",
    "captured_ms",
    "async_ms",
    "executable_ms",
)
START_FIGURES: Final = (
    "first_step_s",
    "first_three_steps_s",
    "start_to_first_step_s",
    "cached_programs",
)
FEWEST_STARTS: Final = 2
"""Processes of each system, measured or not: the first starts cold, those after it warm."""
LOSS_TOLERANCE: Final = 2e-2
"""Relative; five steps of float32 training, convolutions summed in another order."""

TOO_DEEP: Final = {(f"gpt_{layers}_layers", "jax") for layers in (48, 96)}
"""Pairs that are left out: XLA takes a minute for jax's 24 layers, and four times that for twice."""

_MSG_DIED: Final = "{system} on {workload} ended early (status {status}); its last output:\n{tail}"

Figures = dict[str, Any]


class ChildError(RuntimeError):
    """A measuring process ended before it answered."""


class Child:
    """A running ``child.py``."""

    def __init__(self, workload: str, system: str, python: str, cache: Path | None) -> None:
        self.workload, self.system = workload, system
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        environment = {**os.environ, "PJRT_DEVICE": os.environ.get("PJRT_DEVICE", "CPU")}
        environment.pop("XLA_PERSISTENT_CACHE_PATH", None)
        environment.update(ENVIRONMENTS.get(system, {}))
        if system == "torch_xla":  # its interpreter must not find this project's torch_xla
            environment.pop("PYTHONPATH", None)
        if cache is not None:
            environment["XLA_PERSISTENT_CACHE_PATH"] = str(cache)
        self._process = subprocess.Popen(
            [python, str(HERE / "child.py"), workload, system, str(time.time())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        try:
            self.start: Figures = self._answer()
        except ChildError:
            self.close()
            raise

    def _answer(self) -> Figures:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        status = self._process.wait()
        self._log.seek(0)
        tail = "".join(self._log.readlines()[-15:])
        raise ChildError(
            _MSG_DIED.format(system=self.system, workload=self.workload, status=status, tail=tail)
        )

    def ask(self, question: str) -> Figures:
        """One line in, one answer out. Raises ChildError when the process is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(question + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # reading the answer says why it is gone
        return self._answer()

    def close(self) -> None:
        """End the process: at once if it is still at work."""
        self._process.terminate()
        self._process.communicate()
        self._log.close()


def start_all(
    workload: str, pythons: Mapping[str, str], cache: Path, results: Mapping[str, Figures]
) -> dict[str, Child]:
    """Start the systems one after the other; one that cannot has its error in ``results``."""
    children: dict[str, Child] = {}
    for system, python in pythons.items():
        folder = None if system == "cpu" else cache / system
        if folder is not None:
            folder.mkdir(mode=0o700, exist_ok=True)
        try:
            children[system] = Child(workload, system, python, folder)
        except ChildError as error:
            results[system]["error"] = str(error)
    return children


def run_rounds(
    children: Mapping[str, Child], rounds: int, seconds: float, results: Mapping[str, Figures]
) -> None:
    """Rounds of all systems by turns, added to ``results`` as those of one process each."""
    taken: dict[str, list[Figures]] = {system: [] for system in children}
    questions = [str(seconds)] * rounds + ["finish"]
    for number, question in enumerate(questions):
        for system in list(children)[:: 1 if number % 2 == 0 else -1]:
            if "error" not in results[system]:
                try:
                    taken[system].append(children[system].ask(question))
                except ChildError as error:
                    results[system]["error"] = str(error)
    for system, child in children.items():
        if "error" not in results[system]:
            *figures, totals = taken[system]
            for name, value in totals.items():
                # the first process compiled: what it needed is what a user's first run needs
                results[system].setdefault(name, value)
            if figures:
                results[system]["processes"].append({**medians(figures), "rounds": figures})
        child.close()


def medians(taken: Sequence[Figures]) -> Figures:
    """The median of each figure over rounds or processes; None where a system does not have it."""
    result: Figures = {}
    for name in ROUND_FIGURES:
        values = [figures[name] for figures in taken if figures[name] is not None]
        result[name] = statistics.median(values) if values else None
    if result["trace_ms"] is not None:
        hosts = [figures["trace_ms"] + figures["sync_ms"] for figures in taken]
        result["host_ms"] = statistics.median(hosts)
    return result


def measure(
    workload: str, pythons: Mapping[str, str], processes: int, rounds: int, seconds: float
) -> dict[str, Figures]:
    """All figures of one workload, by system."""
    results: dict[str, Figures] = {system: {"processes": []} for system in pythons}
    warm: dict[str, list[Figures]] = {system: [] for system in pythons}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(max(processes, FEWEST_STARTS)):
            measured = number < processes
            running = {
                system: python
                for system, python in pythons.items()
                if "error" not in results[system] and (measured or system != "cpu")
            }
            children = start_all(workload, running, Path(folder), results)
            for system, child in children.items():
                start = {name: child.start[name] for name in START_FIGURES}
                if number == 0:
                    results[system].update(losses=child.start["losses"], cold=start)
                else:
                    warm[system].append(start)
            run_rounds(children, rounds if measured else 0, seconds, results)
    for system, figures in results.items():
        if figures["processes"]:
            figures.update(medians(figures["processes"]))
        if system != "cpu" and warm[system]:
            figures["warm"] = {
                name: statistics.median_low(start[name] for start in warm[system])
                for name in START_FIGURES
            }
            figures["warm_starts"] = warm[system]
    check_losses(results)
    return results


def check_losses(results: Mapping[str, Figures]) -> None:
    """Mark a system whose losses are not the eager CPU's: its times would mean nothing."""
    if "losses" not in results.get("cpu", {}):
        return
    expected: list[float] = results["cpu"]["losses"]
    for figures in results.values():
        got: list[float] = figures.get("losses") or expected
        worst = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(got, expected, strict=True))
        if not worst <= LOSS_TOLERANCE:
            figures["error"] = f"losses {got} are not the eager CPU's {expected}"


def machine() -> Figures:
    """Where the figures were taken."""
    import torch

    return {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def interpreters(wanted: Sequence[str], *, depth: bool = False) -> dict[str, str]:
    """The interpreter of each system that can run here. SystemExit where one asked for cannot."""
    peer = os.environ.get("TORCH_XLA_PYTHON")
    if "torch_xla" in wanted and not peer:
        raise SystemExit(
            "torch_xla needs TORCH_XLA_PYTHON: the python of an environment with the official "
            "torch_xla 2.9.0 and torch 2.9.0; benchmarks/README.md says how to make one"
        )
    usual = ["xla", *(["xla_inlined"] if depth else []), "torch_xla", "cpu"]
    names = wanted or [name for name in usual if peer or name != "torch_xla"]
    return {name: peer if name == "torch_xla" and peer else sys.executable for name in names}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workload", action="append", choices=list(ALL_WORKLOADS), help="repeatable (default: all)"
    )
    parser.add_argument(
        "--depth", action="store_true", help="shallow and deep models, repeats outlined and inlined"
    )
    parser.add_argument(
        "--system", action="append", choices=list(SYSTEMS), help="repeatable (default: all here)"
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="measured processes of each system (default 1)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="in each process (default 7)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a round (default 1)")
    parser.add_argument("--json", type=Path, help="file (default: benchmarks/results/DATE.json)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 if any system failed on any workload."""
    options = parse_arguments(argv)
    pythons = interpreters(options.system or [], depth=options.depth)
    began = time.strftime("%Y-%m-%dT%H:%M:%S")
    results: dict[str, dict[str, Figures]] = {}
    for workload in options.workload or (DEPTH_WORKLOADS if options.depth else WORKLOADS):
        print(f"measuring {workload} ...", file=sys.stderr, flush=True)
        systems = {s: python for s, python in pythons.items() if (workload, s) not in TOO_DEEP}
        results[workload] = measure(
            workload, systems, options.processes, options.rounds, options.seconds
        )
    print_tables(results)
    target = options.json or HERE / "results" / f"{began.replace(':', '')}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "began": began,
        "machine": machine(),
        "processes": options.processes,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "workloads": results,
    }
    target.write_text(json.dumps(content, indent=1) + "\n")
    print(f"figures written to {target}")
    return int(any("error" in figures for row in results.values() for figures in row.values()))


if __name__ == "__main__":
    sys.exit(main())
