"""What xla-debug costs a training step: with nothing enabled, and with the metrics file on.

``python benchmarks/overhead.py`` trains small models and, in the same process, changes between three states
every few steps: *without* (no listener and no locator, as where xla-debug is not installed),
*installed* (what it attaches by itself), and *metrics_file* (``XLA_METRICS_FILE`` written at every
step). Each round of a state is paired with the round of *without* beside it; the figure is the median
ratio of their mean step times, with the middle half of the ratios. One process for all of them: two
processes that run the same program differ by several percent on their own. The exit status is 1 if
*installed* costs 1 % or more, or the metrics file 3 % or more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

KINDS: Final = ("without", "installed", "metrics_file")
LIMITS: Final = {"installed": 1.01, "metrics_file": 1.03}
SETTLING: Final = 30


class States:
    """Attaches and detaches xla-debug in this process."""

    def __init__(self, path: Path) -> None:
        os.environ["XLA_METRICS_FILE"] = ""
        os.environ["PJRT_DEVICE"] = "CPU"
        import torch_xla
        from xla_core.contract import events
        from xla_core.extension_api import source_location
        from xla_core.testing.internals import exchange_followers
        from xla_debug.live import listeners, metrics_file
        from xla_debug.stacks import stack_frames

        torch_xla.device()  # starts the client, and with it the extensions
        self._events, self._where = events, source_location
        self._listeners, self._metrics_file, self._places = listeners, metrics_file, stack_frames
        self._exchange_followers = exchange_followers
        self._followers: list[Any] = []
        self._path = path
        self._undo: list[Any] = []
        if not events.listening(events.RunRequested):
            raise RuntimeError("xla-debug is not installed: nobody listens to the core")
        listeners.stop()
        source_location.set_locator(None)

    def enter(self, state: str) -> None:
        """Be in ``state`` from now on."""
        while self._undo:
            self._undo.pop()()
        if state == "without":
            return
        self._listeners.start()
        self._undo.append(self._listeners.stop)
        self._where.set_locator(self._places.locate)
        self._undo.append(lambda: self._where.set_locator(None))
        if state == "metrics_file":
            os.environ["XLA_METRICS_FILE"] = str(self._path)
            self._exchange_followers(self._followers)
            self._undo.append(self._pause)
            marked = self._events.StepMarked
            self._undo.append(self._events.subscribe(marked, self._metrics_file.on_step))

    def _pause(self) -> None:
        # the file stays open, and what it knows: opening it anew in every round would be in the figures
        self._followers = self._exchange_followers([])

    def finish(self) -> None:
        """Do the work that xla-debug still owes for the steps so far: it belongs to their time."""
        self._metrics_file.flush()


def measure(workload: str, rounds: int, round_seconds: float, states: States) -> dict[str, Any]:
    """Ratios of step times to those without xla-debug."""
    import torch

    import torch_xla
    from workloads import build

    step = build(workload, torch.device("xla"))

    def run(state: str, count: int) -> float:
        states.enter(state)
        step()  # the very first record opens the file and sorts what was counted before
        torch_xla.sync(wait=True)
        begin = time.perf_counter()
        for _ in range(count):
            loss = step()
            torch_xla.sync()
        torch_xla.sync(wait=True)
        states.finish()
        del loss
        return (time.perf_counter() - begin) / count

    for state in KINDS:
        one = run(state, SETTLING)
    steps = max(5, int(round_seconds / one))
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        # every state is first, second and last equally often
        order = KINDS[number % 3 :] + KINDS[: number % 3]
        for kind in order if number % 2 else order[::-1]:
            times[kind].append(run(kind, steps))
    found: dict[str, object] = {
        "steps_per_round": steps,
        "rounds": rounds,
        "step_ms": {kind: statistics.median(t) * 1e3 for kind, t in times.items()},
    }
    for kind in LIMITS:
        ratios = [a / b for a, b in zip(times[kind], times["without"], strict=True)]
        quarters = statistics.quantiles(ratios, n=4)
        found[kind] = {
            "ratio": statistics.median(ratios),
            "middle_half": [quarters[0], quarters[2]],
        }
    return found


def main() -> int:
    """Measure, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workload", action="append", help="of workloads.py (several times)")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=0.1, help="length of a round")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    chosen = parser.parse_args()
    workloads = chosen.workload or ["mnist_cnn", "mlp_adam"]
    with tempfile.TemporaryDirectory() as folder:
        states = States(Path(folder) / "metrics.txt")
        found = {name: measure(name, chosen.rounds, chosen.seconds, states) for name in workloads}
        states.enter("without")
    print(f"{'workload':14} {'step ms':>8} {'installed':>10} {'metrics file':>13}")
    for name, f in found.items():
        cells = "  ".join(f"{f[kind]['ratio'] - 1:+9.2%}" for kind in LIMITS)
        print(f"{name:14} {f['step_ms']['without']:8.2f}  {cells}")
    if chosen.json:
        content = {"python": platform.python_version(), "workloads": found}
        chosen.json.write_text(json.dumps(content, indent=1) + "\n")
    good = all(f[kind]["ratio"] < limit for f in found.values() for kind, limit in LIMITS.items())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
