"""What the flight recorder costs a training step: the cost of its records, times as many as a step makes.

``python benchmarks/flight.py`` trains a small model, counts the records of a step, and times making as many by
themselves; beside it a step of one addition, about the shortest there is. It does not compare two runs: what is
looked for is less than the noise between them. The exit status is 1 where the model's share is 1 % or more.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Final

LIMIT: Final = 0.01
STEPS: Final = 50
REPEATS: Final = 20_000


def seconds(call: Callable[[], object], times: int) -> float:
    """The median of five rounds of ``times`` calls, per call."""
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            call()
        rounds.append((time.perf_counter() - began) / times)
    return statistics.median(rounds)


def workloads() -> dict[str, Callable[[], None]]:
    """Steps by name: a small transformer that trains, and one addition."""
    import torch
    from torch import nn

    import torch_xla

    layers = [nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(4)]
    model = nn.Sequential(*layers).to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, 16, 64).to("xla")
    held = [torch.ones(8, device="xla")]

    def trains() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        torch_xla.sync()

    def adds() -> None:
        held[0] = held[0] + 1
        torch_xla.sync()

    return {"transformer of 4 layers": trains, "one addition": adds}


def measured(step: Callable[[], None]) -> dict[str, float]:
    """Microseconds of a step on the host, of its records, and their share."""
    from xla_core.support import flight_ring

    for _ in range(10):
        step()
    before = flight_ring.records()[-1][1]
    for _ in range(STEPS):
        step()
    made = [record for record in flight_ring.records() if record[1] > before]
    spans = sum(record[2] > 0 for record in made) / STEPS
    steps = sum(record[0] == flight_ring.STEP for record in made) / STEPS
    cost = spans * seconds(
        lambda: flight_ring.waited(flight_ring.begin(flight_ring.LAUNCH, "step")), REPEATS
    )
    cost += steps * seconds(flight_ring.step, REPEATS)
    whole = seconds(step, STEPS)
    return {
        "step": whole * 1e6,
        "records": spans + steps,
        "flight": cost * 1e6,
        "share": cost / whole,
    }


def main() -> int:
    """Measure, print a line of JSON per workload, and judge the first."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    found = {name: measured(step) for name, step in workloads().items()}
    for name, figures in found.items():
        rounded = {key: round(value, 5) for key, value in figures.items()}
        print(json.dumps({"workload": name, **rounded}))
    return int(next(iter(found.values()))["share"] >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
