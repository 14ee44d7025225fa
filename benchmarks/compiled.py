"""The host time of a training step under ``torch.compile(backend='openxla')`` beside the lazy step's.

``python benchmarks/compiled.py`` trains the same small models three ways on the ``xla`` device: lazily,
with the model's forward and backward compiled by Dynamo, and inside ``torch_xla.compile``. The ways
take turns in one process, a round each, in alternating order. *host* is the time until ``sync()``
returns, *step* until the device is done; figures are medians over all steps. The exit status is 1
if a way compiled anything after its first steps, or if the losses differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

import torch_xla
from models import GPT
from xla_core.extension_api.programs import program_runs
from xla_core.support import counters

SETTLING: Final = 4
TOLERANCE: Final = 2e-3
"""Relative; the same sums in programs that are cut differently."""

Step = Callable[[], torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor]


def mlp() -> tuple[nn.Module, Iterator[Batch]]:
    """Eight linear layers of width 128, batch 64."""
    layers = [part for _ in range(7) for part in (nn.Linear(128, 128), nn.ReLU())]
    batches = [(torch.randn(64, 128), torch.randint(10, (64,))) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(128, 10)), _endless(batches)


def gpt() -> tuple[nn.Module, Iterator[Batch]]:
    """GPT d=64 of four layers, 32 tokens, batch 2."""
    texts = [torch.randint(256, (2, 33)) for _ in range(4)]
    model = GPT(vocabulary=256, width=64, layers=4, heads=4, length=32)
    return model, _endless([(t[:, :-1], t[:, 1:]) for t in texts])


def _endless(batches: list[Batch]) -> Iterator[Batch]:
    return itertools.cycle([(x.to("xla"), y.to("xla")) for x, y in batches])


MODELS: Final = {"mlp_8_layers": mlp, "gpt_4_layers": gpt}
WAYS: Final = ("lazy", "openxla", "torch_xla.compile")


def build(model_name: str, way: str) -> Step:
    """A training step (AdamW) of the model, from the same seed for every way."""
    torch.manual_seed(0)
    plain, batches = MODELS[model_name]()
    plain.to("xla").train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-4)
    model = torch.compile(plain, backend="openxla") if way == "openxla" else plain

    def step() -> torch.Tensor:
        inputs, labels = next(batches)
        optimizer.zero_grad()
        logits = model(inputs)
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        loss.backward()
        optimizer.step()
        return loss

    return torch_xla.compile(step) if way == "torch_xla.compile" else step


def timed(step: Step) -> tuple[float, float]:
    """Milliseconds of one step until ``sync()`` returned, and until the device was done."""
    begin = time.perf_counter()
    loss = step()
    torch_xla.sync()
    host = time.perf_counter()
    torch_xla.sync(wait=True)
    done = time.perf_counter()
    del loss
    return (host - begin) * 1e3, (done - begin) * 1e3


def measure(model_name: str, rounds: int, steps: int) -> dict[str, Any]:
    """Figures of one model by way."""
    ways = {way: build(model_name, way) for way in WAYS}
    first = {way: [step().item() for _ in range(SETTLING)] for way, step in ways.items()}
    for step in ways.values():
        timed(step)
    programs = len(program_runs())
    graphs = counters.all_counters().get("DynamoExtractCompiledGraph", 0)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS if number % 2 else reversed(WAYS):
            times[way] += [timed(ways[way]) for _ in range(steps)]
    return {
        "ways": {
            way: {
                "host_ms": statistics.median(h for h, _ in found),
                "step_ms": statistics.median(s for _, s in found),
                "losses": first[way],
            }
            for way, found in times.items()
        },
        "steps": rounds * steps,
        "dynamo_graphs": graphs,
        "programs_compiled_while_measuring": len(program_runs()) - programs,
    }


def agree(found: dict[str, Any]) -> bool:
    """Whether nothing compiled while it was measured, and all ways compute the same losses."""
    expected = found["ways"]["lazy"]["losses"]
    same = all(
        abs(a - b) <= TOLERANCE * abs(b)
        for way in WAYS
        for a, b in zip(found["ways"][way]["losses"], expected, strict=True)
    )
    return same and not found["programs_compiled_while_measuring"]


def main() -> int:
    """Measure, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=tuple(MODELS), action="append")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    chosen = parser.parse_args()
    found = {}
    for name in chosen.model or MODELS:
        torch._dynamo.reset()
        counters.clear_counters()
        found[name] = measure(name, chosen.rounds, chosen.steps)
    print(f"{'model':16} {'way':18} {'host ms':>8} {'step ms':>8}")
    for name, figures in found.items():
        for way, f in figures["ways"].items():
            print(f"{name:16} {way:18} {f['host_ms']:8.2f} {f['step_ms']:8.2f}")
    if chosen.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        chosen.json.write_text(json.dumps({**versions, "models": found}, indent=1) + "\n")
    return 0 if all(agree(figures) for figures in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
