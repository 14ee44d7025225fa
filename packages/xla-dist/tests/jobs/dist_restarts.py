"""Jobs that are killed and begin again: what their processes run."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
from torch_xla.experimental.distributed_checkpoint import CheckpointManager
from torch_xla.experimental.resume import ResumableLoader, RunCheckpoints, restart_count
from xla_core.support import counters


def note(folder, index, text):
    path = Path(folder) / f"{restart_count()}-{index}"
    path.write_text(text)


def dies(index, folder, attempts, how):
    """Replica 1 ends at the first ``attempts`` attempts; then what each attempt loaded and compiled is noted."""
    x = torch.ones(3, device="xla") * 2
    torch_xla.sync()
    total = xm.all_reduce("sum", x).cpu().tolist()
    found = counters.all_counters()
    names = "PersistentCacheHit", "UncachedCompile"
    note(folder, index, f"{total} {'/'.join(str(found.get(name, 0)) for name in names)}")
    if restart_count() < attempts and index == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("no such luck")
    xm.rendezvous("end")


def saves_when_asked(index, folder):
    """Loops until it is asked to end; notes the step at which it took its checkpoint."""
    dist.init_process_group("gloo", init_method="xla://")
    saver = CheckpointManager(f"{folder}/run", 1 << 30)
    weights = torch.zeros(2, device="xla")
    for step in range(1, 100000):
        weights += 1
        torch_xla.sync()
        if saver.save(step, {"weights": weights}):
            assert saver.ending
            note(folder, index, f"{step} {weights.cpu().tolist()}")
            return
        if step == 3:
            (Path(folder) / f"ready-{index}").write_text(str(os.getppid()))
        time.sleep(0.01)


def launches_again(_index, folder):
    """A launcher of one host among several; replica 1 is killed at the first attempt."""
    torch_xla.launch(dies, (folder, 1, "kill"), start_method="forkserver", max_restarts=2)


def fills_a_disk(index, folder):
    """Replica 1 cannot write as much as it should; what each is told of it is noted."""
    dist.init_process_group("gloo", init_method="xla://")
    saver = CheckpointManager(f"{folder}/run", 1)
    state = {f"part {n}": torch.full((1 << 16,), float(n), device="xla") for n in range(4)}
    saver.save(1, state)
    if index == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, resource.RLIM_INFINITY))
    try:
        saver.save(2, state)
    except OSError as error:
        note(folder, index, f"{error.errno} {error}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    saver.save(2, state)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert saver.restore_latest(found) == 2
    assert all(torch.equal(found[name].cpu(), state[name].cpu()) for name in state)


def launches_and_is_terminated(_index, folder):
    """A launcher; somebody sends it SIGTERM."""
    torch_xla.launch(saves_when_asked, (folder,), start_method="forkserver", max_restarts=1)
    (Path(folder) / "went on").touch()


VOCABULARY, WIDTH, LENGTH, ITEMS = 32, 16, 8, 60


class Block(nn.Module):
    """A layer of a GPT, with dropout: its losses depend on random states."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.ln1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(att.transpose(1, 2).flatten(2)), self.rate)
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """Two layers, small enough for many processes."""

    def __init__(self, rate, wrap=lambda block: block):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([wrap(Block(rate)) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def gpt(sharded, rate):
    torch.manual_seed(0)
    if not sharded:
        model = GPT(rate).to("xla")
        xm.broadcast_master_param(model)
        return model
    return FSDP(GPT(rate, lambda block: FSDP(block.to("xla"))).to("xla"))


def trains(index, folder, steps, kills=None, sharded=False, asynchronous=True, rate=0.1):
    """Trains a GPT; what each step lost is a line of ``losses``. ``kills``: by attempt who dies, when."""
    dist.init_process_group("gloo", init_method="xla://")
    model = gpt(sharded, rate)
    torch.manual_seed(100 + index)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    data = torch.randint(
        VOCABULARY, (ITEMS, LENGTH + 1), generator=torch.Generator().manual_seed(1)
    )
    loader = ResumableLoader(data, 12)
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "data": loader,
        "note": index * 0,
    }
    checkpoints = RunCheckpoints(f"{folder}/run", 1, max_to_keep=2)
    step = checkpoints.resume(state)
    who, when, seconds = (kills or {}).get(restart_count(), (None, None, None))
    while step < steps:
        for ids in loader:
            if (index, step) == (who, when):
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            ids = ids.to("xla")
            optimizer.zero_grad()
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step() if sharded else xm.optimizer_step(optimizer)
            schedule.step()
            value = xm.all_reduce("sum", loss.detach()).item()
            if index == 0:
                with Path(f"{folder}/losses").open("a") as file:
                    file.write(f"{restart_count()} {step} {value.hex()}\n")
            (checkpoints.save_async if asynchronous else checkpoints.save)(step, state)
            step += 1
            if step == steps:
                break
    checkpoints.join()
    return step
