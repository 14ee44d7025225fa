"""Many different programs in one process: its mappings, memory and time, and what is forgotten meanwhile.

``python benchmarks/many_programs.py --programs 100000`` computes ``(ones(a, b) * 2 + 1.5).sum()`` for that many
different shapes and reads each result, each with a program of its own (``XLA_VARYING_SHAPES=0``). A line is printed
for every hundredth part. With ``--cache DIRECTORY`` programs are kept there, and ``--again N`` meets the first
``N`` shapes once more at the end, by when most of their programs were forgotten: they are loaded from there, or
compiled again. A process remembers up to 500,000 entries of recorded steps, four of each program here, so that
100,000 programs do not fill that table: with ``--remember N`` it forgets them at ``N``. The exit status is 1 if a
result is wrong, or if memory, mappings or open files went on growing by more than a fifth after as many programs
were met as the process keeps.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROWS: Final = 400
"""Shapes are ``(1 + n % ROWS, 1 + n // ROWS)``."""
ALLOWED_GROWTH: Final = 1.2
COUNTERS: Final = ("UncachedCompile", "PersistentCacheHit", "ProgramEvicted")
_PAGE: Final = resource.getpagesize()

Sample = dict[str, Any]


def wrong_results(first: int, stop: int) -> list[int]:
    """Meet the shapes numbered ``first`` to ``stop``; the numbers of those whose sum is wrong."""
    os.environ["XLA_VARYING_SHAPES"] = "0"
    import torch

    found = []
    for number in range(first, stop):
        rows, columns = 1 + number % ROWS, 1 + number // ROWS
        total = (torch.ones(rows, columns, device="xla") * 2 + 1.5).sum().item()
        if total != rows * columns * 3.5:
            found.append(number)
    return found


def sample(programs: int) -> Sample:
    """What the process holds after so many programs."""
    import torch_xla.debug.metrics as met
    from xla_core.extension_api.programs import all_programs
    from xla_core.testing.internals import count_memory_mappings

    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    return {
        "programs": programs,
        "kept": len(all_programs()),
        "mappings": count_memory_mappings(),
        "resident_MB": round(resident / 1e6, 1),
        "files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "cpu_s": round(time.process_time(), 1),
        **{name: int(met.counter_value(name) or 0) for name in COUNTERS},
    }


def run(programs: int, again: int) -> tuple[list[Sample], list[int]]:
    """Samples after every hundredth part, and the shapes whose results were wrong."""
    part = max(1, programs // 100)
    samples: list[Sample] = []
    wrong: list[int] = []
    for first in range(0, programs, part):
        stop = min(first + part, programs)
        wrong += wrong_results(first, stop)
        samples.append(sample(stop))
        print(*(f"{name}={value}" for name, value in samples[-1].items()), flush=True)
    if again:
        wrong += wrong_results(0, again)
        samples.append({**sample(programs + again), "again": again})
        print("again:", *(f"{name}={value}" for name, value in samples[-1].items()))
    return samples, wrong


def growing(samples: Sequence[Sample]) -> list[str]:
    """What was more at the end than when programs were first forgotten, by more than ``ALLOWED_GROWTH``."""
    full = [each for each in samples if each["ProgramEvicted"]]
    return [
        f"{name} grew from {full[0][name]} to {full[-1][name]}"
        for name in ("mappings", "resident_MB", "files")
        if full and full[-1][name] > full[0][name] * ALLOWED_GROWTH
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and say whether anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=100_000)
    parser.add_argument("--again", type=int, default=0)
    parser.add_argument(
        "--remember", type=int, help="entries of recorded steps to remember at most"
    )
    parser.add_argument("--cache", type=Path, help="directory of a persistent cache")
    parser.add_argument("--json", type=Path, help="where to write the samples")
    options = parser.parse_args(argv)
    if not 0 <= options.again <= options.programs:
        parser.error(f"--again {options.again} is not between 0 and --programs {options.programs}")
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    if options.cache:
        os.environ["XLA_PERSISTENT_CACHE_PATH"] = str(options.cache)
    if options.remember is not None:
        from xla_core.testing import internals

        internals.limit_remembered_entries(options.remember)
    samples, wrong = run(options.programs, options.again)
    faults = [f"the sum of shape number {number} is wrong" for number in wrong]
    faults += growing(samples)
    print(*faults, sep="\n", file=sys.stderr)
    if options.json:
        written = {"taken": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "samples": samples}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
