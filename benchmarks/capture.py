"""What a captured step costs the host, beside the same step recorded, and beside its executable alone.

``python benchmarks/capture.py`` measures, for each workload in one process and taking turns:

- *recorded*: the host's time for an ordinary step and its sync, not waiting for the device;
- *captured*: the same for the replayed step;
- *replay*: the replayed step with a stand-in for the executable that computes nothing and returns at once: what
  this project adds to a launch. It is held against 30 us and 0.1 us per buffer;
- *async*: replayed steps one behind the other with one wait at the end, against as many runs of the executable
  alone, which must not be faster by more than 5 %.

Times of the host are those of the thread's own processor time, so that other processes do not count; the least of
several rounds is given. Losses of both are compared, bit by bit. The exit status is 1 where these differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

import torch_xla
from torch_xla.experimental.capture import capture
from workloads import ALL_WORKLOADS, build
from xla_core.testing.internals import replays_of

WORKLOADS: Final = (
    "mlp_adam", "gpt_12_layers", "lstm_32_steps", "views_loop", "resnet18_inference", "gpt_4_layers",
)  # fmt: skip
FIXED_MICROSECONDS: Final = 30.0
PER_BUFFER: Final = 0.1
STEPS_TO_RECORD: Final = 4
REPLAYS: Final = 200
"""In one round."""


class Stub:
    """In place of a buffer that the next run takes, and that nothing looks at."""

    __slots__ = ("__weakref__",)


class Instant:
    """In place of an executable: gives results at once, and takes nothing.

    In place of the results that the next run takes (``taken``) each run gives new objects, which are made before,
    so that the replay finds no other references to them. The others are the same in all runs.
    """

    def __init__(self, executable: Any, results: Sequence[Any], taken: Sequence[int]) -> None:
        self._executable = executable
        self._results = results
        self._taken = frozenset(taken)
        self._prepared: list[list[Any]] = []

    def prepare(self, runs: int) -> None:
        """Make the results of so many runs."""
        taken = self._taken
        self._prepared = [
            [Stub() if i in taken else buffer for i, buffer in enumerate(self._results)]
            for _ in range(runs)
        ]

    def deferred(self, arguments: list[Any], results: list[Any], known: bool = False) -> Any:
        """One run, when the iterator is exhausted."""
        del arguments, known
        return map(results.extend, (self._prepared.pop(),))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)


class Workload:
    """One workload, recorded and captured."""

    def __init__(self, name: str) -> None:
        device = torch_xla.device()
        self.name = name
        self.recorded, captured = build(name, device), build(name, device)
        self.step = capture(captured.train)  # type: ignore[attr-defined]
        self.batches = captured.batches  # type: ignore[attr-defined]
        self.same = self._losses_agree()
        self.batch = next(self.batches)
        (self.replay,) = replays_of(self.step)

    def _losses_agree(self) -> bool:
        losses: tuple[list[Any], list[Any]] = [], []
        for _ in range(2 * STEPS_TO_RECORD):
            losses[0].append(self.run_recorded().detach())
            losses[1].append(self.run_captured())
        return [t.item() for t in losses[0]] == [t.item() for t in losses[1]]

    def run_recorded(self) -> torch.Tensor:
        """One ordinary step, not waited for."""
        loss = self.recorded()
        torch_xla.sync()
        return loss

    def run_captured(self) -> torch.Tensor:
        """One replayed step, not waited for."""
        loss: torch.Tensor = self.step(*next(self.batches))
        return loss

    def buffers(self) -> int:
        """Inputs and results of the program."""
        program = self.replay.program
        return len(program.inputs) + len(program.output_index)

    # -- the executable alone ----------------------------------------------------------------------

    def _arguments(self) -> list[Any]:
        replay, backend = self.replay, self.replay.trace.backend
        found = [backend.copy(b) for b in replay.inputs(list(self.batch))]
        if replay.numbers.size:
            found.append(backend.put_numbers(replay.numbers))
        if replay.integers.size:
            found.append(backend.put_numbers(replay.integers))
        return found

    def executable_seconds(self, count: int) -> float:
        """Seconds of one run of the executable by itself; each takes what the one before gave back."""
        program, client = self.replay.program, self.replay.trace.backend.client
        execute, aliases = program.executable.execute, program.aliases
        arguments = self._arguments()
        results: list[Any] = []
        for measured in (False, True):
            begin = time.perf_counter()
            for _ in range(count if measured else 2):
                results = execute(arguments)
                for slot, position in aliases:
                    arguments[slot] = results[position]
            client.wait(results)
        return (time.perf_counter() - begin) / count

    def async_seconds(self, count: int) -> float:
        """Seconds of one replayed step, when none is waited for but the last."""
        for measured in (False, True):
            begin = time.perf_counter()
            for _ in range(count if measured else 2):
                loss = self.step(*self.batch)
            torch_xla.sync(wait=True)
        del loss
        return (time.perf_counter() - begin) / count

    def replay_microseconds(self, rounds: int) -> float:
        """The least processor time of a replay that launches nothing."""
        replay = self.replay
        program, backend = replay.program, replay.trace.backend
        executable = program.executable
        results = executable.execute(self._arguments())
        backend.client.wait(results)
        instant = program.executable = Instant(executable, results, [p for _, p in program.aliases])
        copied = program.copied_donations
        times = []
        try:
            for _ in range(rounds):
                instant.prepare(REPLAYS + 1)
                self.step(*self.batch)
                times.append(cpu_microseconds(lambda: self.step(*self.batch), REPLAYS))
        finally:
            program.executable = executable
        if program.copied_donations > copied + 1:  # the first run meets the real buffers
            raise SystemExit(f"{self.name}: buffers were copied, which no step of the user's does")
        return min(times)


def cpu_microseconds(run: Callable[[], object], count: int, wait: bool = False) -> float:
    """The thread's own processor time for one call."""
    spent = 0.0
    for _ in range(count):
        if wait:
            torch_xla.sync(wait=True)
        begin = time.thread_time()
        kept = run()
        spent += time.thread_time() - begin
        del kept
    return spent / count * 1e6


def measure(name: str, rounds: int) -> dict[str, Any]:
    """The figures of one workload."""
    workload = Workload(name)
    recorded = min(cpu_microseconds(workload.run_recorded, 5, True) for _ in range(rounds))
    captured = min(cpu_microseconds(workload.run_captured, 5, True) for _ in range(rounds))
    ratios = []
    count = max(5, int(0.2 / workload.async_seconds(5)))
    for _ in range(rounds):
        ratios.append(workload.async_seconds(count) / workload.executable_seconds(count))
    buffers = workload.buffers()
    return {
        "same": workload.same,
        "buffers": buffers,
        "recorded": recorded,
        "captured": captured,
        "replay": workload.replay_microseconds(2 * rounds),
        "allowed": FIXED_MICROSECONDS + PER_BUFFER * buffers,
        "async": statistics.median(ratios),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 0 where all losses agree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", action="append", choices=list(ALL_WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(argv)
    found = {}
    print(
        "| workload | buffers | recorded us | captured us | replay us | allowed us | ratio | async |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in options.workload or WORKLOADS:
        row = found[name] = measure(name, options.rounds)
        print(
            f"| {name} | {row['buffers']} | {row['recorded']:.0f} | {row['captured']:.0f} "
            f"| {row['replay']:.0f} | {row['allowed']:.0f} | 1/{row['recorded'] / row['replay']:.0f} "
            f"| {row['async']:.2f} |{'' if row['same'] else ' losses differ'}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(row["same"] for row in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
