"""A long life in little time: training that saves, evaluates, meets new shapes and is interrupted; what grows?

``python benchmarks/long_life.py --minutes 40 --json FIGURES --picture CURVES.svg`` trains a small GPT for that
long: every step as short as possible, so that an hour has the steps of days. ``--processes 2`` trains in that
many processes, which reduce their gradients (and are not interrupted: that would end the job). After every few
hundred steps each process notes its memory, the values and bytes on the device, descriptors, sockets, threads,
mappings, objects of Python and the size of every listed cache. SIGTERM ends the run early. ``--draw FIGURES``
draws such figures again and trains nothing. ``--rounds 4`` lives four times as long, and empties every table
after each round: what is left then grows only if something is kept that no table lists.

Tables that fill grow, and are no leak: so the process has small bounds, and few different shapes to meet. It has
settled once it has dropped all that it remembers of its steps twice. From then on something grows, and does not
level off, if its median in the last third of the samples is over 3 % more than in the third before. The exit status
is 1 if something grew, a loss is not finite or a cache is larger than its bound, 2 if the run was too short.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import curves

EVALUATES, SAVES, RESTORES, MEETS_SHAPE, ERRS, INTERRUPTED = 100, 250, 1000, 25, 130, 70
"""Every so many steps."""
SAMPLED: Final = 250
"""Steps from one sample to the next: a sample costs as much as some hundred of them."""
KEPT: Final = "32"
"""Programs that the process keeps, so that it soon has to forget some."""
REMEMBERED: Final = 4000
"""Entries of recorded steps that it keeps, for the same reason."""
KINDS: Final = 16
"""Kinds of steps whose sizes vary: each step that an interrupt cuts at another place is one."""
SIZES, LENGTHS = 60, 12
"""Sizes that operators meet and lengths of steps: more than programs are kept, and soon all met."""
SETTLED: Final = 2
"""So often the process has forgotten its steps by the time that its figures count."""
ALLOWED_GROWTH: Final = 1.03
LEAST_SAMPLES: Final = 24
"""Of fewer, since it has settled, nobody can tell what grows."""
SLACK: Final = {"resident_MB": 15.0, "objects": 5000.0, "mappings": 100.0}
"""Growth by more than this share is let pass up to so much; 4 of anything else."""
VOCABULARY, WIDTH, HEADS, LENGTH, BATCH, ITEMS = 64, 32, 2, 16, 4, 400

MSG_SHORT: Final = (
    "too short to tell what grows: {count} samples of a settled process, of at least {least}"
)

Sample = dict[str, Any]
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class Life:
    """A process that trains; ``losses`` are those of evaluations, ``counts`` what has happened so far."""

    def __init__(self, index: int, folder: str, processes: int) -> None:
        import torch

        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.distributed.parallel_loader as pl
        from models import GPT
        from torch_xla.experimental.resume import ResumableLoader, RunCheckpoints

        self.torch, self.torch_xla, self.xm, self.processes = torch, torch_xla, xm, processes
        self.dice = random.Random(7 * index)
        self.device = torch_xla.device()
        torch.manual_seed(0)
        self.model = GPT(VOCABULARY, WIDTH, 2, HEADS, 4 * LENGTH).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1000, 0.999)
        texts = torch.randint(VOCABULARY, (ITEMS, LENGTH + 1))
        self.loader = ResumableLoader(
            texts, BATCH * processes, wrap=lambda loader: pl.MpDeviceLoader(loader, self.device)
        )
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "data": self.loader,
        }
        self.checkpoints = RunCheckpoints(f"{folder}/run", save_interval=1, max_to_keep=2)
        self.losses: list[float] = []
        self.counts: Counter[str] = Counter()

    def loss(self, texts: Any) -> Any:
        """The mean loss of the next token, for (batch, length) tokens."""
        scores = self.model(texts[:, :-1])
        return self.torch.nn.functional.cross_entropy(scores.flatten(0, 1), texts[:, 1:].flatten())

    def train(self, texts: Any) -> None:
        """One step."""
        self.optimizer.zero_grad()
        self.loss(texts).backward()
        if self.processes > 1:
            self.xm.optimizer_step(self.optimizer)
        else:
            self.optimizer.step()
        self.schedule.step()
        self.torch_xla.sync()

    def evaluate(self, texts: Any) -> None:
        """A loss that is read, without gradients."""
        self.model.eval()
        with self.torch.no_grad():
            self.losses.append(self.loss(texts).item())
        self.model.train()

    def meet_shape(self, texts: Any) -> None:
        """A training step of another length, and operators of shapes that were not there before."""
        length = 4 * (1 + self.dice.randrange(LENGTHS))
        other = self.torch.randint(VOCABULARY, (BATCH, length + 1)).to(self.device)
        self.train(other)
        for _ in range(3):
            size = 331 * self.dice.randrange(1, SIZES)
            total = (self.torch.ones(size, device=self.device) * 2 + 1.5).sum().item()
            assert total == size * 3.5, (total, size)

    def err(self, texts: Any) -> None:
        """Mistakes of a user: shapes that do not fit."""
        for _ in range(3):
            try:
                _ = texts + self.torch.ones(BATCH + 1, LENGTH + 7, device=self.device)
            except RuntimeError:
                self.counts["errors"] += 1
            else:
                raise AssertionError("shapes that do not fit were added")

    def interrupted(self, texts: Any) -> None:
        """A training step into which Ctrl-C comes at a random moment, or after its end."""
        seconds = self.dice.random() * 0.03
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            self.train(texts)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        except KeyboardInterrupt:
            self.counts["interrupts"] += 1

    def save(self, _texts: Any) -> None:
        """A checkpoint in the background."""
        self.checkpoints.save_async(self.counts["steps"], self.state)

    def restore(self, _texts: Any) -> None:
        """Everything as it was at the last checkpoint."""
        self.checkpoints.join()
        assert self.checkpoints.resume(self.state) > 0
        self.counts["restored"] += 1

    def live(self, minutes: float, note: Callable[[Life], None]) -> None:
        """Train for so long; ``note`` is called every ``SAMPLED`` steps."""
        until = time.monotonic() + minutes * 60
        for texts in self.batches():
            if self.counts["steps"] % SAMPLED == 0:
                note(self)
            if self.over(time.monotonic() >= until):
                break
            for name, doing in self.due():
                doing(texts)
                self.counts[name] += 1
            self.train(texts)
            self.counts["steps"] += 1
        self.checkpoints.join()
        note(self)

    def batches(self) -> Iterator[Any]:
        """Epoch after epoch, each with a loader of its own."""
        while True:
            yield from self.loader

    def over(self, here: bool) -> bool:
        """Whether all processes are to end: asked at every hundredth step where there are several."""
        if self.processes > 1 and self.counts["steps"] % 100:
            return False
        self.checkpoints.should_save(self.counts["steps"])  # which looks for SIGTERM
        here = here or self.checkpoints.ending
        if self.processes == 1:
            return here
        flag = self.torch.tensor([float(here)], device=self.device)
        return bool(self.xm.all_reduce("max", flag).item())

    def due(self) -> Iterator[tuple[str, Callable[[Any], None]]]:
        """What is to happen before the next step besides."""
        step = self.counts["steps"]
        plan: list[tuple[str, int, Callable[[Any], None]]] = [
            ("evaluations", EVALUATES, self.evaluate),
            ("saves", SAVES, self.save),
            ("mistakes", ERRS, self.err),
        ]
        if self.processes == 1:  # the others would wait for ever, or meet other shapes
            plan += [
                ("shapes", MEETS_SHAPE, self.meet_shape),
                ("interruptions", INTERRUPTED, self.interrupted),
                ("restores", RESTORES, self.restore),
            ]
        return ((name, doing) for name, every, doing in plan if step and step % every == 0)


def sample(life: Life, started: float) -> Sample:
    """What the process holds now."""
    from xla_core.support import caches
    from xla_core.testing.internals import count_memory_mappings
    from xla_debug import memory

    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    links = [_target(path) for path in Path("/proc/self/fd").iterdir()]
    live = memory.live_tensors()
    used = life.xm.get_memory_info(life.device)["bytes_used"]
    return {
        "minutes": round((time.monotonic() - started) / 60, 3),
        "resident_MB": round(resident / 1e6, 1),
        "device_KB": round(used / 1e3, 1),
        "values": len(live),
        "descriptors": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
        "mappings": count_memory_mappings(),
        "objects": len(gc.get_objects()),
        "cpu_s": round(time.process_time(), 1),
        "counts": dict(life.counts),
        "caches": {name: cache.size() for name, cache in caches.registered().items()},
        "over_bound": [
            f"cache {name!r} has {cache.size()} entries, its bound is {cache.bound()}"
            for name, cache in caches.registered().items()
            if cache.size() > cache.bound()
        ],
    }


def emptied(life: Life) -> Sample:
    """What the process holds once it has forgotten all that it remembers of steps and programs."""
    import torch_xla.runtime as xr
    from xla_core.testing import internals

    xr.clear_computation_cache()
    gc.collect()
    internals.release_free_memory()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    return {
        "steps": life.counts["steps"],
        "shapes": life.counts["shapes"],
        "resident_MB": round(resident / 1e6, 1),
        "objects": len(gc.get_objects()),
    }


def _target(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:  # the descriptor of the folder itself
        return ""


def lives(index: int, folder: str, minutes: float, processes: int, rounds: int) -> None:
    """One process's life; its samples are in ``folder``, a line each, and what was left after each round."""
    from xla_core.contract import events
    from xla_core.testing import internals

    started = time.monotonic()
    if processes > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method="xla://")
    signal.signal(signal.SIGALRM, _interrupt)
    internals.limit_remembered_entries(REMEMBERED)
    internals.limit_varying_steps(KINDS)
    life = Life(index, folder, processes)
    events.subscribe(events.StepsForgotten, lambda _event: life.counts.update(forgotten=1))
    with Path(folder, f"samples-{index}").open("w") as file:

        def note(life: Life) -> None:
            one = sample(life, started)
            one["bad_losses"] = sum(not math.isfinite(loss) for loss in life.losses)
            life.losses.clear()
            file.write(json.dumps(one) + "\n")
            file.flush()
            shown = {k: v for k, v in one.items() if isinstance(v, int | float)}
            print(f"{index}:", *(f"{k}={v}" for k, v in shown.items()), life.counts, flush=True)

        left = []
        for _ in range(rounds):
            life.live(minutes, note)
            if rounds > 1:
                left.append(emptied(life))
                print(f"{index}: emptied:", left[-1], flush=True)
    Path(folder, f"emptied-{index}").write_text(json.dumps(left))


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def read(folder: str, processes: int) -> list[list[Sample]]:
    """The samples of each process."""
    return [
        [json.loads(line) for line in Path(folder, f"samples-{index}").read_text().splitlines()]
        for index in range(processes)
    ]


def settled(samples: Sequence[Sample]) -> Sequence[Sample]:
    """The samples since the process has settled: the tables that fill have done so."""
    return [one for one in samples if one["counts"].get("forgotten", 0) >= SETTLED]


def thirds(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """The median of each figure in the middle and in the last third of the samples; nothing of too few."""
    count = len(samples)
    if count < LEAST_SAMPLES:
        return {}
    parts = samples[count // 3 : 2 * count // 3], samples[2 * count // 3 :]
    return {name: (_median(parts[0], name), _median(parts[1], name)) for name in curves.SHOWN}


def _median(samples: Sequence[Sample], name: str) -> float:
    return float(statistics.median(one[name] for one in samples))


def faults(samples: Sequence[Sample]) -> list[str]:
    """What is wrong with one process's figures."""
    wrong = [text for one in samples for text in one["over_bound"]]
    wrong += [f"{s['bad_losses']} losses are not finite" for s in samples if s["bad_losses"]]
    for name, (early, late) in thirds(settled(samples)).items():
        if late > early * ALLOWED_GROWTH and late - early > SLACK.get(name, 4.0):
            wrong.append(f"{name} grew from {early:g} to {late:g}")
    return sorted(set(wrong))


def judged(processes: Sequence[Sequence[Sample]]) -> int:
    """Say what was wrong, and what each figure was in both thirds; the exit status."""
    wrong = [text for samples in processes for text in faults(samples)]
    print(*wrong, sep="\n", file=sys.stderr)
    lasting = [settled(samples) for samples in processes]
    for index, samples in enumerate(lasting):
        for name, (early, late) in thirds(samples).items():
            print(f"{index}: {name} {early:g}, then {late:g}")
    if wrong:
        return 1
    fewest = min(map(len, lasting))
    if fewest < LEAST_SAMPLES:
        print(MSG_SHORT.format(count=fewest, least=LEAST_SAMPLES), file=sys.stderr)
        return 2
    return 0


def machine() -> str:
    """What this was run on."""
    model = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PHYS_PAGES") * _PAGE / 1e9
    name = model[0] if model else platform.machine()
    return f"{name}, {os.cpu_count()} cores, {memory:.0f} GB, Python {platform.python_version()}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run or read, draw, and say whether anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1, help="each so long (%(default)s)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--picture", type=Path, help="where to draw the curves, an SVG")
    parser.add_argument("--draw", type=Path, help="figures that are there already")
    options = parser.parse_args(argv)
    figures = json.loads(options.draw.read_text()) if options.draw else taken(options)
    if options.picture:
        options.picture.write_text(curves.drawn(figures), "utf-8")
    return judged(figures["processes"])


def taken(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a run, written where they are wanted."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("XLA_COMPILATION_CACHE_SIZE", KEPT)
    os.environ.setdefault("XLA_COMPILE_EFFORT", "fast")  # more of the time goes into steps
    with tempfile.TemporaryDirectory(prefix="xla-long-life-") as folder:
        arguments = (folder, options.minutes, options.processes, options.rounds)
        if options.processes == 1:
            lives(0, *arguments)
        else:
            os.environ["CPU_NUM_DEVICES"] = str(options.processes)
            import torch_xla

            torch_xla.launch(lives, arguments)
        processes = read(folder, options.processes)
        names = [f"emptied-{index}" for index in range(options.processes)]
        left = [json.loads(Path(folder, name).read_text()) for name in names]
    figures = {
        "taken": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "minutes": options.minutes,
        "processes": processes,
        "emptied": left,
    }
    if options.json:
        options.json.write_text(json.dumps(figures) + "\n")
    return figures


if __name__ == "__main__":
    sys.exit(main())
