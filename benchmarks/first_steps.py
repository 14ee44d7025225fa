"""The first steps of a training loop, with programs compiled beside the work and one after another.

``python benchmarks/first_steps.py`` runs each workload in new processes, which take turns: with
``XLA_COMPILE_THREADS`` at its default and at 0. A process records ``--steps`` steps, syncs each without waiting,
and waits at the end. Figures are seconds from before the model is built until the first ``sync()`` has returned,
until the last one has, and until all steps are done; the table has medians over the rounds, and medians of the
ratios of two neighbouring processes, which a busy machine disturbs less. The exit status is 1 if losses differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from child import private_stdout

HERE: Final = Path(__file__).resolve().parent
WORKLOADS: Final = ("gpt_12_layers", "gpt_48_layers", "resnet18", "resnet50")
COLUMNS: Final = ("first sync", "last sync", "done", "cpu")
VARIANTS: Final[dict[str, dict[str, str]]] = {"beside": {}, "waiting": {"XLA_COMPILE_THREADS": "0"}}


def measure(workload: str, steps: int) -> dict[str, Any]:
    """The figures of this process, which has run nothing before."""
    import torch_xla
    import workloads

    device = torch_xla.device()
    torch_xla.sync()
    began, cpu = time.perf_counter(), time.process_time()
    step = workloads.build(workload, device)
    losses, returned = [], []
    for _ in range(steps):
        losses.append(step())
        torch_xla.sync()
        returned.append(time.perf_counter() - began)
    torch_xla.sync(wait=True)
    done = time.perf_counter() - began
    figures = (returned[0], returned[-1], done, time.process_time() - cpu)
    return {"losses": [loss.item() for loss in losses], **dict(zip(COLUMNS, figures, strict=True))}


def child(workload: str, variant: str, steps: int) -> dict[str, Any]:
    """The figures of a new process."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_COMPILE_THREADS"}
    found = subprocess.run(
        [sys.executable, str(HERE / "first_steps.py"), "--child", workload, "--steps", str(steps)],
        env={**environment, **VARIANTS[variant]},
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        sys.exit(found.stderr)
    return dict(json.loads(found.stdout.splitlines()[-1]))


def main() -> None:
    """Run the processes in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        answer = private_stdout()
        answer(measure(options.child, options.steps))
        return
    same = True
    print(f"{os.cpu_count()} cores, {options.rounds} rounds, {options.steps} steps, seconds")
    for workload in options.workload or WORKLOADS:
        rounds: list[dict[str, dict[str, Any]]] = []
        for number in range(options.rounds):
            order = list(VARIANTS)[:: 1 if number % 2 else -1]
            rounds.append({v: child(workload, v, options.steps) for v in order})
        for variant in VARIANTS:
            medians = [statistics.median(r[variant][c] for r in rounds) for c in COLUMNS]
            cells = "  ".join(f"{c} {m:6.2f}" for c, m in zip(COLUMNS, medians, strict=True))
            print(f"{workload:16} {variant:8} {cells}")
        ratios = [
            statistics.median(r["beside"][c] / r["waiting"][c] for r in rounds) for c in COLUMNS
        ]
        cells = "  ".join(f"{c} {m:6.2f}" for c, m in zip(COLUMNS, ratios, strict=True))
        print(f"{workload:16} {'ratio':8} {cells}", flush=True)
        losses = {tuple(r[v]["losses"]) for r in rounds for v in VARIANTS}
        same = same and len(losses) == 1
    sys.exit(0 if same else "losses differ")


if __name__ == "__main__":
    main()
