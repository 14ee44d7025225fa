"""Measures one workload on one system in this process; ``run.py`` starts it and asks for rounds.

Usage: ``python child.py WORKLOAD SYSTEM STARTED`` (STARTED: ``time.time()`` at the start of the
process). It answers on stdout, one JSON object per line: first what the first steps cost, then one
for each line on stdin: a number asks for a round of about that many seconds, ``finish`` for the
totals. All else that is printed goes to stderr. Runs on torch 2.9 and later.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMPARED_STEPS = 5
"""Steps whose losses are handed back, so that the systems can be held against each other."""
SETTLING_STEPS = 3
"""Steps before the first round: every program is compiled, caches and allocators are warm."""
CAPTURING_STEPS = 6
"""Calls of a captured step before the first round: more than it takes until it is replayed."""
FEWEST_STEPS, MOST_STEPS = 2, 200
REPLAY_SHARE = 0.25
"""Part of a round's time spent on the executable alone."""
AUTOGRAD_THREADS = "pt_autograd_"
"""What the names of the threads begin with on which PyTorch runs backward passes of devices."""
OF_ONE_THREAD = 6
"""In the number of a Linux clock: the processor time of one thread, whose id stands beside it."""

Answer = Callable[[dict[str, Any]], None]


def private_stdout() -> Answer:
    """Keep stdout for answers: whatever else prints (C++ logs too) lands on stderr."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(figures: dict[str, Any]) -> None:
        channel.write(json.dumps(figures) + "\n")
        channel.flush()

    return answer


def host_clocks() -> list[int]:
    """Clocks of the threads that run the step's Python: this one, and those of autograd."""
    clocks = [time.CLOCK_THREAD_CPUTIME_ID]
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith(AUTOGRAD_THREADS):
            clocks.append((~int(task.name) << 3) | OF_ONE_THREAD)
    return clocks


class Bench:
    """One workload on one system."""

    def __init__(self, workload: str, system: str) -> None:
        # Imported here so that the time from process start contains what a user's imports cost.
        from systems import SYSTEMS

        self.system = SYSTEMS[system]()
        self.step = self.system.build(workload)
        self.captured: Callable[[], Any] | None = None
        self.step_seconds = 0.0
        self.clocks: list[int] = []

    def first_steps(self, process_started: float) -> dict[str, Any]:
        """Run the first steps; seconds of the first, of the first three, since process start."""
        # The model's and data's transfers are not part of the first step.
        self.system.sync()
        self.system.wait()
        losses, seconds = [], []
        since_start = 0.0
        for _ in range(COMPARED_STEPS):
            begin = time.perf_counter()
            loss = self.step()
            self.system.sync()
            self.system.wait()
            seconds.append(time.perf_counter() - begin)
            since_start = since_start or time.time() - process_started
            losses.append(loss.item())
        return {
            "first_step_s": seconds[0],
            "first_three_steps_s": sum(seconds[:3]),
            "start_to_first_step_s": since_start,
            "cached_programs": self.system.cached_programs(),
            "losses": losses,
        }

    def settle(self) -> None:
        """Steps that no figure contains; the last one tells how long a round's steps take."""
        for _ in range(SETTLING_STEPS):
            begin = time.perf_counter()
            self.one_step()
            self.step_seconds = time.perf_counter() - begin
        self.captured = self.system.capture(self.step)
        if self.captured is not None:
            for _ in range(CAPTURING_STEPS):
                self.captured()
                self.system.wait()
        self.clocks = host_clocks()

    def busy_seconds(self, step: Callable[[], Any], sync: bool) -> float:
        """Processor time of the threads that run Python, up to the return of ``sync()`` where there is one."""
        begin = sum(map(time.clock_gettime, self.clocks))
        loss = step()
        if sync:
            self.system.sync()
        spent = sum(map(time.clock_gettime, self.clocks)) - begin
        self.system.wait()
        del loss
        return spent

    def busy(self, step: Callable[[], Any], sync: bool, steps: int) -> float:
        """The median of ``busy_seconds`` over so many steps."""
        return statistics.median(self.busy_seconds(step, sync) for _ in range(steps))

    def one_step(self) -> tuple[float, float, float]:
        """Seconds of tracing, of ``sync()``, and of the whole step until the work is done."""
        begin = time.perf_counter()
        loss = self.step()
        traced = time.perf_counter()
        self.system.sync()
        synced = time.perf_counter()
        self.system.wait()
        done = time.perf_counter()
        del loss  # alive until here, as in a user's loop: the program has it as an output
        return traced - begin, synced - traced, done - begin

    def asynchronous(self, steps: int) -> float:
        """Seconds per step when only the last one is waited for."""
        begin = time.perf_counter()
        for _ in range(steps):
            loss = self.step()
            self.system.sync()
        self.system.wait()
        del loss
        return (time.perf_counter() - begin) / steps

    def round(self, seconds: float) -> dict[str, Any]:
        """Medians of single steps, recorded and captured, the asynchronous mean, the executable alone."""
        fitting = int(seconds / 2 / max(self.step_seconds, 1e-6))
        steps = min(max(fitting, FEWEST_STEPS), MOST_STEPS)
        singles = [self.one_step() for _ in range(steps)]
        columns = zip(*singles, strict=True)
        trace, sync, step = (statistics.median(column) * 1e3 for column in columns)
        self.step_seconds = step / 1e3
        busy = self.busy(self.step, sync=True, steps=steps)
        captured = None
        if self.captured is not None:  # it has enqueued its step when it returns
            captured = self.busy(self.captured, sync=False, steps=steps)
        asynchronous = self.asynchronous(steps) * 1e3
        repeats = int(seconds * REPLAY_SHARE / max(self.step_seconds, 1e-6))
        alone = self.system.executable_seconds(min(max(repeats, FEWEST_STEPS), MOST_STEPS))
        return {
            "steps": steps,
            "trace_ms": trace,
            "sync_ms": sync,
            "step_ms": step,
            "busy_ms": busy * 1e3,
            "captured_ms": None if captured is None else captured * 1e3,
            "async_ms": asynchronous,
            "executable_ms": None if alone is None else alone * 1e3,
        }

    def totals(self) -> dict[str, Any]:
        """What is known only at the end."""
        return {
            "programs": self.system.programs(),
            "fallbacks": self.system.fallbacks(),
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def main() -> None:
    """Answer until stdin ends or ``finish`` comes."""
    answer = private_stdout()
    workload, system, started = sys.argv[1:4]
    bench = Bench(workload, system)
    answer(bench.first_steps(float(started)))
    for line in sys.stdin:
        if line.strip() == "finish":
            answer(bench.totals())
            break
        if not bench.step_seconds:
            bench.settle()
        answer(bench.round(float(line)))


if __name__ == "__main__":
    main()
