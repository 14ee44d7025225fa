"""Many processes on the CPU: training steps, collectives beside gloo's own, background loading.

    python benchmarks/distributed.py [--processes 1 2 4] [--seconds 1] [--rounds 3] [--json FILE]

Steps: the CNN and the GPT with one global batch split over the processes, gradients reduced in one
collective or in buckets of 1 MiB, beside PyTorch's own CPU with DistributedDataParallel over gloo in the same
processes. Collectives: all_reduce of float32 by size, on ``xla`` tensors and on CPU tensors through
torch.distributed's gloo, by turns in the same processes. Loading: a loop over a data set that takes
as long to read as to train on, plain and with MpDeviceLoader. Medians over all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.runtime as xr
from models import GPT
from xla_dist.processes.launching import run_multiprocess

HERE = Path(__file__).resolve().parent
GLOBAL_BATCH = 32
VOCABULARY, LENGTH = 256, 64
BUCKETS = ("0", "1")
"""Values of ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB: all in one, and buckets of one MiB."""
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24)
"""Bytes of one all_reduce."""
CHAIN = 10
"""Collectives in one step, each waiting for the one before: what one costs inside a program."""

PARTS = ("steps", "all_reduce", "loading")

Step = Callable[[], None]


def cnn(share: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Two convolutions and two linear layers (0.4 M parameters), and a batch of 28x28 images."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    return model, torch.randn(share, 1, 28, 28), torch.randint(10, (share,))


def gpt(share: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A GPT of width 128 with two layers (0.5 M parameters), and a batch of tokens."""
    model = GPT(VOCABULARY, width=128, layers=2, heads=4, length=LENGTH)
    tokens = torch.randint(VOCABULARY, (share, LENGTH + 1))
    return model, tokens[:, :-1], tokens[:, 1:]


WORKLOADS = {"cnn": cnn, "gpt": gpt}


def loss_of(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the last dimension."""
    return F.cross_entropy(output.flatten(0, -2), labels.flatten())


def xla_step(name: str) -> Step:
    """A training step on the device; done when it returns."""
    torch.manual_seed(0)
    model, inputs, labels = WORKLOADS[name](GLOBAL_BATCH // xr.world_size())
    model, inputs, labels = model.to("xla"), inputs.to("xla"), labels.to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(inputs), labels).backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync(wait=True)

    return step


def eager_step(name: str) -> Step:
    """The same on PyTorch's own CPU, with DistributedDataParallel over gloo."""
    torch.manual_seed(0)
    model, inputs, labels = WORKLOADS[name](GLOBAL_BATCH // dist.get_world_size())
    if dist.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(inputs), labels).backward()
        optimizer.step()

    return step


def join_gloo(port: int) -> None:
    """torch.distributed's gloo between the processes of this job."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=xr.global_ordinal(),
        world_size=xr.world_size(),
    )  # fmt: skip


def by_turns(steps: dict[str, Step], rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Milliseconds of each step; every process takes equally many, as each waits for the others."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step(), step()  # compiling, and what the first run prepares
    for _ in range(rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            once = xm.mesh_reduce("once", time.perf_counter() - began, max)
            for _ in range(max(3, int(seconds / once))):
                began = time.perf_counter()
                step()
                taken[name].append(1e3 * (time.perf_counter() - began))
    return {
        name: {"median_ms": statistics.median(times), "steps": len(times)}
        for name, times in taken.items()
    }


def bucketed(step: Step, size: str) -> Step:
    """``step`` with another size of buckets."""

    def run() -> None:
        os.environ["ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"] = size
        step()

    return run


def measure_steps(port: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Every workload on this process."""
    torch.set_num_threads(1)
    join_gloo(port)
    found = {}
    for name in WORKLOADS:
        steps: dict[str, Step] = {}
        for size in BUCKETS if xr.world_size() > 1 else BUCKETS[:1]:
            label = "xla, 1 collective" if size == "0" else f"xla, buckets of {size} MiB"
            steps[label] = bucketed(xla_step(name), size)
        steps["eager DDP, gloo"] = eager_step(name)
        found[name] = by_turns(steps, rounds, seconds)
    return found


def measure_collectives(port: int, rounds: int, seconds: float) -> dict[str, Any]:
    """all_reduce by size on this process."""
    torch.set_num_threads(1)
    join_gloo(port)
    found = {}
    for size in SIZES:
        device_value, host_value = torch.ones(size // 4).to("xla"), torch.ones(size // 4)

        def alone(value: torch.Tensor = device_value) -> None:
            xm.all_reduce(xm.REDUCE_MAX, value).cpu()

        def chained(value: torch.Tensor = device_value) -> None:
            for _ in range(CHAIN):
                value = xm.all_reduce(xm.REDUCE_MAX, value)
            torch_xla.sync(wait=True)

        def gloo(value: torch.Tensor = host_value) -> None:
            dist.all_reduce(value, dist.ReduceOp.MAX)

        steps: dict[str, Step] = {
            "xla, a step of one": alone,
            f"xla, a step of {CHAIN}": chained,
            "gloo": gloo,
        }
        rows = by_turns(steps, rounds, seconds)
        rows[f"xla, a step of {CHAIN}"]["median_ms"] /= CHAIN
        for row in rows.values():
            row["MB_per_s"] = size / row["median_ms"] / 1e3
        found[str(size)] = rows
    return found


class SlowData(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images that take ``seconds`` to arrive, as from a disk."""

    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.seconds)
        return torch.full((GLOBAL_BATCH, 1, 28, 28), float(index)), torch.zeros(GLOBAL_BATCH).long()


def plain_batches(loader: Any) -> Iterator[object]:
    """Each batch read and sent when it is needed."""
    for images, labels in loader:
        yield images.to("xla"), labels.to("xla")
        torch_xla.sync(wait=True)


def measure_loading(batches: int) -> dict[str, float]:
    """Milliseconds per batch of a loop that reads, sends and trains, in one process."""
    torch.set_num_threads(1)
    model = cnn(1)[0].to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(loop: Any) -> float:
        began = time.perf_counter()
        for images, labels in loop:
            optimizer.zero_grad()
            loss_of(model(images), labels).backward()
            xm.optimizer_step(optimizer)
        torch_xla.sync(wait=True)
        return 1e3 * (time.perf_counter() - began) / batches

    def loader(seconds: float) -> Any:
        return torch.utils.data.DataLoader(SlowData(batches, seconds), batch_size=None)

    train(plain_batches(loader(0.0)))
    train(pl.MpDeviceLoader(loader(0.0), "xla"))
    compute = train(plain_batches(loader(0.0)))
    reading = compute / 1e3
    return {
        "train_ms": compute,
        "read_ms": 1e3 * reading,
        "one_after_the_other_ms": train(plain_batches(loader(reading))),
        "MpDeviceLoader_ms": train(pl.MpDeviceLoader(loader(reading), "xla")),
    }


def free_port() -> int:
    """A port for gloo's own meeting."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_job(processes: int, function: Callable[..., object], *arguments: Any) -> Any:
    """What process 0 of a job finds."""
    os.environ["CPU_NUM_DEVICES"] = str(processes)
    return run_multiprocess(function, *arguments)[0]


def print_rows(title: str, rows: dict[str, dict[str, float]]) -> None:
    """One table."""
    print(f"\n{title}")
    for name, row in rows.items():
        rate = f"{row['MB_per_s']:10.0f} MB/s" if "MB_per_s" in row else ""
        print(f"  {name:24s}{row['median_ms']:10.3f} ms{rate}   ({row['steps']} steps)")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each system in each round")
    parser.add_argument("--batches", type=int, default=50, help="of the loading loop (default 50)")
    parser.add_argument("--json", type=Path, help="file for the figures; it keeps others'")
    return parser.parse_args(argv)


def take_steps(processes: Sequence[int], rounds: int, seconds: float) -> dict[str, Any]:
    """Training steps, by number of processes and workload."""
    found = {}
    for count in processes:
        found[str(count)] = run_job(count, measure_steps, free_port(), rounds, seconds)
        for name, rows in found[str(count)].items():
            print_rows(f"{name}, a step of {count} processes", rows)
    return found


def take_collectives(processes: Sequence[int], rounds: int, seconds: float) -> dict[str, Any]:
    """all_reduce, by number of processes and bytes."""
    found = {}
    for count in (n for n in processes if n > 1):
        found[str(count)] = run_job(count, measure_collectives, free_port(), rounds, seconds)
        for size, rows in found[str(count)].items():
            print_rows(f"all_reduce of {size} bytes between {count} processes", rows)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = parse_arguments(argv)
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ["OMP_NUM_THREADS"] = "1"
    lengths = (options.rounds, options.seconds)
    found: dict[str, Any] = {"cpus": os.cpu_count(), "torch": torch.__version__}
    found["global_batch"] = GLOBAL_BATCH
    for part in options.parts:
        began, load = time.strftime("%Y-%m-%dT%H:%M:%S"), os.getloadavg()[0]
        if part == "steps":
            figures = take_steps(options.processes, *lengths)
        elif part == "all_reduce":
            figures = take_collectives(options.processes, *lengths)
        else:
            figures = run_job(1, measure_loading, options.batches)
            print("\nloading, per batch:", {name: round(v, 2) for name, v in figures.items()})
        found[part] = {"began": began, "load_average": load, **figures}
    if options.json:
        former = json.loads(options.json.read_text()) if options.json.exists() else {}
        for part in set(former) & set(options.parts):  # by number of processes
            found[part] = {**former[part], **found[part]}
        options.json.write_text(json.dumps({**former, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
