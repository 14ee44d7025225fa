"""Jobs that are killed and begin again: what their processes run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch_xla.experimental.resume import restart_count


def note(folder, index, text):
    path = Path(folder) / f"{restart_count()}-{index}"
    path.write_text(text)


def dies(index, folder, attempts, how):
    """Replica 1 ends at the first ``attempts`` attempts; then what each attempt compiled is noted."""
    x = torch.ones(3, device="xla") * 2
    torch_xla.sync()
    total = xm.all_reduce("sum", x).cpu().tolist()
    note(folder, index, f"{total} {met.counter_value('PersistentCacheHit') or 0}")
    if restart_count() < attempts and index == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("no such luck")
    xm.rendezvous("end")


def saves_when_asked(index, folder):
    """Loops until it is asked to end; notes the step at which it took its checkpoint."""
    import torch.distributed as dist

    from torch_xla.experimental.distributed_checkpoint import CheckpointManager

    dist.init_process_group("gloo", init_method="xla://")
    saver = CheckpointManager(f"{folder}/run", 1 << 30)
    weights = torch.zeros(2, device="xla")
    for step in range(1, 100000):
        weights += 1
        torch_xla.sync()
        if saver.save(step, {"weights": weights}):
            note(folder, index, f"{step} {weights.cpu().tolist()}")
            return
        if step == 3:
            (Path(folder) / f"ready-{index}").write_text(str(os.getppid()))
        time.sleep(0.01)


def launches_and_is_terminated(_index, folder):
    """A launcher; somebody sends it SIGTERM."""
    torch_xla.launch(saves_when_asked, (folder,), start_method="forkserver", max_restarts=1)
    (Path(folder) / "went on").touch()
