"""Kills a process of a job that trains a GPT, again and again: do the losses stay the same, how long does it take?

``python benchmarks/restarts.py --kills 10`` trains in four processes, with dropout, shuffled data and a checkpoint
at every step, and kills one of them (SIGKILL, from outside, at a random moment) until ten have died; the job starts
again by itself. The same training without kills has to have the same losses, bit for bit. ``--fewer 3`` kills one
more and goes on with three processes, beside a run that changes from four to three at the same step by itself.

It prints the figures as JSON. The exit status is 1 if a loss differs, if a kill made more than one step run twice
(two with ``--asynchronous``), or if a restart took longer than 30 s: from the kill to the end of the first step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

LIMIT_SECONDS: Final = 30.0
VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH, BATCH, ITEMS = 64, 32, 2, 2, 16, 12, 160
STEPS_BETWEEN: Final = 4
"""A process dies after so many steps of an attempt, or up to twice as many."""


class Step(NamedTuple):
    """A step that has ended: attempt, number, the loss's bits, the time, and process 0's processor time."""

    attempt: int
    number: int
    loss: str
    time: float
    processor: float


def trains(index: int, folder: str, steps: int, sharded: bool, asynchronous: bool) -> None:
    """Train up to ``steps`` from the newest checkpoint in ``folder``; process 0 notes each step."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F

    import torch_xla
    import torch_xla.core.xla_model as xm
    from models import GPT
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel
    from torch_xla.experimental.resume import ResumableLoader, RunCheckpoints, restart_count

    Path(folder, f"pid-{index}").write_text(str(os.getpid()))
    dist.init_process_group("gloo", init_method="xla://")
    device = torch_xla.device()
    torch.manual_seed(0)
    model: Any = GPT(VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH).to(device)
    if sharded:
        model = XlaFullyShardedDataParallel(model)
    torch.manual_seed(100 + index)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    texts = torch.randint(
        VOCABULARY, (ITEMS, LENGTH + 1), generator=torch.Generator().manual_seed(1)
    )
    loader = ResumableLoader(texts, BATCH)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": loader}
    checkpoints = RunCheckpoints(f"{folder}/run", save_interval=1, max_to_keep=2)
    step = checkpoints.resume(state)
    while step < steps:
        for batch in loader:
            batch = batch.to(device)
            optimizer.zero_grad()
            scores = F.dropout(model(batch[:, :-1]), 0.1)
            loss = F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step() if sharded else xm.optimizer_step(optimizer)
            schedule.step()
            value = xm.all_reduce("sum", loss.detach()).item()
            if index == 0:
                with Path(folder, "steps").open("a") as file:
                    file.write(
                        f"{restart_count()} {step} {value.hex()} {time.time()} {time.process_time()}\n"
                    )
            (checkpoints.save_async if asynchronous else checkpoints.save)(step, state)
            step += 1
            if step == steps:
                break
    checkpoints.join()


def read(folder: Path) -> list[Step]:
    """The steps that have ended so far, in order."""
    file = folder / "steps"
    lines = file.read_text().splitlines() if file.exists() else []
    return [
        Step(int(attempt), int(number), loss, float(when), float(processor))
        for attempt, number, loss, when, processor in map(str.split, lines)
    ]


def kills(folder: Path, processes: int, times: int, seed: int) -> None:
    """Kill one process in each of the first ``times`` attempts, at a random moment; note who and when."""
    dice = random.Random(seed)
    for attempt in range(times):
        wanted = STEPS_BETWEEN + dice.randrange(STEPS_BETWEEN + 1)
        while sum(step.attempt == attempt for step in read(folder)) < wanted:
            time.sleep(0.005)
        time.sleep(dice.random() * 0.5)
        who = dice.randrange(processes)
        os.kill(int((folder / f"pid-{who}").read_text()), signal.SIGKILL)
        with (folder / "kills").open("a") as file:
            file.write(f"{attempt} {who} {time.time()}\n")


@contextlib.contextmanager
def killing(folder: Path, processes: int, times: int, seed: int) -> Iterator[None]:
    """Inside, a process of its own kills those of the job."""
    killer = multiprocessing.get_context("fork").Process(
        target=kills, args=(folder, processes, times, seed), daemon=True
    )
    killer.start()
    try:
        yield
    finally:
        killer.kill()
        killer.join()


def run(
    folder: Path, processes: int, steps: int, options: argparse.Namespace, **named: Any
) -> None:
    """Train in so many processes. Raises what the job ends with."""
    import torch_xla

    folder.mkdir(exist_ok=True)
    os.environ["CPU_NUM_DEVICES"] = str(processes)
    arguments = (str(folder), steps, options.sharded, options.asynchronous)
    torch_xla.launch(trains, arguments, start_method=options.start_method, **named)


def restarts(place: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Kill and start again; beside it the run that nobody kills."""
    steps = options.kills * 2 * STEPS_BETWEEN + 2 * STEPS_BETWEEN
    killed, whole = place / "killed", place / "whole"
    killed.mkdir()
    with killing(killed, options.processes, options.kills, options.seed):
        run(killed, options.processes, steps, options, max_restarts=options.kills)
    run(whole, options.processes, steps, options)
    wanted = {step.number: step.loss for step in read(whole)}
    taken = read(killed)
    deaths = [
        (int(attempt), int(who), float(when))
        for attempt, who, when in map(str.split, (killed / "kills").read_text().splitlines())
    ]
    seconds, processor, repeated = [], [], []
    for attempt, _, when in deaths:
        after = [step for step in taken if step.attempt == attempt + 1]
        before = [step.number for step in taken if step.attempt == attempt]
        seconds.append(round(after[0].time - when, 1))
        processor.append(round(after[0].processor, 1))
        repeated.append(max(before) + 1 - after[0].number)
    return {
        "processes": options.processes,
        "kills": len(deaths),
        "killed_ordinals": [who for _, who, _ in deaths],
        "steps": len(wanted),
        "different_losses": sum(wanted[step.number] != step.loss for step in taken),
        "missing_steps": sorted(set(wanted) - {step.number for step in taken}),
        "distinct_losses": len(set(wanted.values())),
        "repeated_steps": repeated,
        "seconds_to_the_next_step": seconds,
        "processor_seconds_of_process_0_until_then": processor,
    }


def goes_on_with_fewer(place: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Lose one process and go on with fewer; beside it the run that changes at the same step by itself."""
    killed, whole = place / "fewer", place / "fewer-whole"
    killed.mkdir()
    steps = 6 * STEPS_BETWEEN
    with killing(killed, options.processes, 1, options.seed + 1):
        try:
            run(killed, options.processes, steps, options)
        except Exception as error:  # the job has lost a process, as it should
            ended_by = f"{error}".strip().splitlines()[0]
    before = read(killed)
    run(killed, options.fewer, steps, options)
    after = read(killed)[len(before) :]
    changed_at = after[0].number
    run(whole, options.processes, changed_at, options)
    run(whole, options.fewer, steps, options)
    wanted = {step.number: step.loss for step in read(whole)}
    # A step that was taken with all processes and again with fewer counts as the fewer took it: the run
    # that nobody kills takes it with fewer only.
    taken = [step for step in before if step.number < changed_at] + after
    return {
        "processes": [options.processes, options.fewer],
        "ended_by": ended_by,
        "changed_at_step": changed_at,
        "steps": len(wanted),
        "repeated_steps": [len(before) - changed_at],
        "different_losses": sum(wanted[step.number] != step.loss for step in taken),
        "missing_steps": sorted(set(wanted) - {step.number for step in taken}),
        "seconds_to_the_next_step": [],
    }


def faults(figures: dict[str, Any], asynchronous: bool) -> list[str]:
    """What is not as promised."""
    wrong = [f"{n} losses differ" for n in (figures["different_losses"],) if n]
    wrong += [f"steps {n} are missing" for n in (figures["missing_steps"],) if n]
    allowed = 1 + asynchronous
    wrong += [f"{n} steps ran twice" for n in figures["repeated_steps"] if not 0 <= n <= allowed]
    wrong += [
        f"a restart took {s} s" for s in figures["seconds_to_the_next_step"] if s > LIMIT_SECONDS
    ]
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the figures, and say what was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--fewer", type=int, default=0, help="go on with so many, too")
    parser.add_argument("--sharded", action="store_true", help="XlaFullyShardedDataParallel")
    parser.add_argument("--asynchronous", action="store_true", help="save_async")
    parser.add_argument("--start-method", choices=("spawn", "fork", "forkserver"), default="spawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    options = parser.parse_args(argv)
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = []
    with tempfile.TemporaryDirectory(prefix="xla-restarts-", dir=options.folder) as folder:
        os.environ.setdefault("XLA_PERSISTENT_CACHE_PATH", f"{folder}/programs")
        if options.kills:
            results.append(restarts(Path(folder), options))
        if options.fewer:
            results.append(goes_on_with_fewer(Path(folder), options))
    wrong = [text for figures in results for text in faults(figures, options.asynchronous)]
    for figures in results:
        print(json.dumps({"sharded": options.sharded, **figures}))
    print(*wrong, sep="\n", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
