"""Kills processes at random moments of saving, and looks whether the newest complete checkpoint always loads.

``python tools/checkpoint_kills.py --kills 200`` prints a line per kind of checkpoint: ``whole`` (``xm.save``, one
file that is replaced), ``async`` (``CheckpointManager.save_async``), ``sharded`` (the same, of tensors over a
mesh of four devices). The status is 1 when a checkpoint that was complete could not be read, or was not what was
saved. Processes are forked from one that has imported everything, and go on where the last one was killed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ["CPU_NUM_DEVICES"] = "4"
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.experimental.distributed_checkpoint import CheckpointManager
from xla_core.extension_api import programs  # noqa: F401 - once, before the forks: all that compiles

KINDS: Final = ("whole", "async", "sharded")
ELEMENTS: Final = 1 << 19
FORMAT: Final = struct.Struct("<cq")
LIMIT: Final = 120.0


class Whole:
    """One file, replaced at each step."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "state.pt"

    def newest(self) -> tuple[int, torch.Tensor] | None:
        """Step and values of the file."""
        if not self.file.exists():
            return None
        state = torch.load(self.file, weights_only=True)
        return state["step"], state["t"]

    def save(self, step: int) -> int:
        """Save; the newest step that is complete now."""
        xm.save({"step": step, "t": torch.full((ELEMENTS,), float(step)).to("xla")}, str(self.file))
        return step


class Managed:
    """A directory for each step, written in the background."""

    def __init__(self, folder: Path, over_mesh: bool) -> None:
        if over_mesh:
            xr.use_spmd()
        self.mesh = xs.Mesh(np.arange(4), (4,), ("x",)) if over_mesh else None
        self.manager = CheckpointManager(
            str(folder), 1, max_to_keep=2, num_of_threads=2, chkpt_on_preemption=False
        )

    def state(self, step: int) -> dict[str, Any]:
        """Values that say which step they are of."""
        t, u = (torch.full((ELEMENTS // 2,), float(step)).to("xla") for _ in range(2))
        if self.mesh is not None:
            xs.mark_sharding(t, self.mesh, ("x",))
        return {"step": step, "t": t, "u": u}

    def newest(self) -> tuple[int, torch.Tensor] | None:
        """Step and values of the newest checkpoint; every file's checksum is compared."""
        state = self.state(-1)
        step = self.manager.restore_latest(state)
        if step is None:
            return None
        if step != max(self.manager.all_steps()) or state["step"] != step:
            raise AssertionError(f"{step} of {self.manager.all_steps()} was read: {state['step']}")
        return step, torch.cat([state["t"].cpu(), state["u"].cpu()])

    def save(self, step: int) -> int:
        """Save; the newest step that is complete now."""
        self.manager.save_async(step, self.state(step))
        return max(self.manager.all_steps(), default=-1)


def run(kind: str, folder: Path, said: int) -> None:
    """Read the newest checkpoint, and then take one after the other, until killed."""
    saver = Whole(folder) if kind == "whole" else Managed(folder, kind == "sharded")
    found = saver.newest()
    step = -1
    if found is not None:
        step, values = found
        if not bool((values == float(step)).all()):
            raise AssertionError(f"the checkpoint of step {step} has the values {values.unique()}")
    os.write(said, FORMAT.pack(b"r", step))
    while True:
        step += 1
        os.write(said, FORMAT.pack(b"b", step))
        complete = saver.save(step)
        os.write(said, FORMAT.pack(b"c", complete))


@dataclasses.dataclass
class Figures:
    """What was seen of one kind."""

    kills: int = 0
    read: int = 0
    complete: int = -1
    wrong: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def take(self, letter: bytes, step: int) -> None:
        """What a process said: it has read a step, or completed one."""
        if letter == b"r":
            self.read += step >= 0
            if step < self.complete:
                self.wrong.append(f"step {self.complete} was complete, and {step} was read")
        if letter in (b"r", b"c"):
            self.complete = max(self.complete, step)


def kill_one(kind: str, folder: Path, figures: Figures, dice: random.Random, kills: bool) -> None:
    """Start a process, and kill it at a random moment after its first saves (once it has read, at the end)."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receiving)
        try:
            run(kind, folder, sending)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(sending)
    begun, until = None, time.monotonic() + LIMIT
    saves, delay = dice.randrange(4), dice.random() * 0.2
    try:
        while begun is None or time.monotonic() < begun + delay:
            left = (until if begun is None else begun + delay) - time.monotonic()
            ready, _, _ = select.select([receiving], [], [], max(left, 0.0))
            if not ready:
                if begun is None:
                    figures.wrong.append("a process neither read nor saved")
                    break
                continue
            content = os.read(receiving, FORMAT.size)
            if not content:
                figures.wrong.append("a process ended by itself")
                break
            letter, step = FORMAT.unpack(content)
            figures.take(letter, step)
            saves -= letter == b"b"
            if letter == b"b" and saves < 0 and begun is None:
                begun = time.monotonic()
            if letter == b"r" and not kills:
                break
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    figures.kills += kills
    # what it said before it was killed
    while content := os.read(receiving, FORMAT.size):
        figures.take(*FORMAT.unpack(content))
    os.close(receiving)


def main() -> int:
    """Kill as often as asked, and say what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--kills", type=int, default=200, help="of all kinds together (%(default)s)"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=chosen.folder))
    failed = False
    for number, kind in enumerate(chosen.kinds):
        place, figures = folder / kind, Figures()
        place.mkdir()
        dice = random.Random(chosen.seed + number)
        begun = time.monotonic()
        for turn in range(chosen.kills // len(chosen.kinds) + 1):
            last = turn == chosen.kills // len(chosen.kinds)
            kill_one(kind, place, figures, dice, kills=not last)
        figures.seconds = time.monotonic() - begun
        left = sorted(p.name for p in place.iterdir())
        sys.stdout.write(
            f"{kind}: {figures.kills} kills, {figures.read} times the newest was read, "
            f"{figures.complete + 1} steps complete, {len(figures.wrong)} wrong {figures.wrong[:3]}, left {left}, "
            f"{figures.seconds:.0f} s\n"
        )
        sys.stdout.flush()
        failed = failed or bool(figures.wrong)
    shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
