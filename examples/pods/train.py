"""Trains a model of ``llama.py`` on the bytes of a text over all chips of a slice: one command, on every host.

    CPU_NUM_DEVICES=8 python examples/pods/train.py --mesh fsdp=8 --length 128 --attention plain
    PJRT_DEVICE=TPU python examples/pods/train.py --size 8b --mesh fsdp=16 --loop --checkpoints gs://bucket/run
    XLA_AOT_TOPOLOGY=v5e:4x4 XLA_AOT_READS=zeros XLA_PERSISTENT_CACHE_PATH=programs \\
        PJRT_DEVICE=TPU python examples/pods/train.py --size 8b --mesh fsdp=16 --loop --steps 3

The first trains on this machine's processors, the second on a slice. The third compiles what the second runs,
without a TPU, and keeps the programs. A run that is asked to end (SIGTERM) saves a checkpoint and ends with status
143; the same command continues from there. The text is the source code of Python's standard library, which every
host has.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import llama
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.experimental.resume import ResumableLoader, RunCheckpoints

ASKED_TO_END = 143
"""The status of a process that SIGTERM ends: a scheduler starts a job again that did not end with 0."""
COMPILES_ONLY = "XLA_AOT_TOPOLOGY" in os.environ


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=llama.SIZES, default="tiny")
    parser.add_argument("--mesh", default="fsdp=1", help="such as data=2,fsdp=8, over all chips")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument(
        "--sequences", type=int, default=0, help="of a step (default: one per part)"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--loop", action="store_true", help="layers as a loop: compiles faster")
    parser.add_argument("--remat", choices=["True", "False", *llama.PARTLY], default="True",
                        help="whether layers are computed again in the backward pass")  # fmt: skip
    parser.add_argument("--attention", choices=["flash", "plain"], default="flash")
    parser.add_argument("--checkpoints", help="a folder or an address, the same for all hosts")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    return parser.parse_args(argv)


class Text(Dataset[torch.Tensor]):
    """Pieces of ``length`` + 1 bytes of the standard library's source code."""

    def __init__(self, length: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        first = index * self.length
        return torch.from_numpy(self.text[first : first + self.length + 1].astype(np.int64))


def mesh_of(text: str) -> xs.Mesh:
    """The mesh over all devices that ``text`` names."""
    pairs = [part.partition("=") for part in text.split(",")]
    devices = np.arange(xr.global_runtime_device_count())
    return xs.Mesh(devices, [int(size) for _, _, size in pairs], [name for name, _, _ in pairs])


def initialize(model: nn.Module) -> None:
    """Fill the parameters, each chip its parts."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0)
    torch_xla.sync()


def batches(mesh: xs.Mesh, sequences: int, length: int) -> ResumableLoader:
    """A loader of batches that lie on the mesh; each host reads its own rows."""
    axes = tuple(axis for axis in llama.BATCH if axis in mesh.axis_names)
    spec = xs.ShardingSpec(mesh, (axes or None, None), minibatch=xr.process_count() > 1)
    device = torch_xla.device()
    return ResumableLoader(
        Text(length),
        sequences,
        wrap=lambda loader: pl.MpDeviceLoader(loader, device, input_sharding=spec),
    )


def train(
    arguments: argparse.Namespace,
    step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    state: dict[str, object],
) -> None:
    """Run steps until all are done, or the process has been asked to end."""
    checkpoints = None
    number = 0
    if arguments.checkpoints and not COMPILES_ONLY:
        if xr.process_count() > 1:  # hosts write one checkpoint together
            dist.init_process_group("gloo", init_method="xla://")
        every = arguments.save_every
        checkpoints = RunCheckpoints(arguments.checkpoints, save_interval=every, max_to_keep=2)
        number = checkpoints.resume(state)
        xm.master_print(f"begins at step {number}")
    while number < arguments.steps and not (checkpoints and checkpoints.ending):
        for batch in state["data"]:
            loss = step(batch[:, :-1], batch[:, 1:])
            torch_xla.sync()
            if checkpoints:
                checkpoints.save_async(number, state)  # at every step; it saves when it is time
            number += 1
            if number % 10 == 0 or number == arguments.steps:
                xm.master_print(f"step {number}: loss {loss.item():.3f}")
            if number == arguments.steps or (checkpoints and checkpoints.ending):
                break
    if checkpoints:
        checkpoints.join()
        if number < arguments.steps:
            sys.exit(ASKED_TO_END)


def main(argv: Sequence[str] | None = None) -> None:
    """Make the model on the mesh, and train it."""
    arguments = parse_arguments(argv)
    xr.use_spmd()
    mesh = mesh_of(arguments.mesh)
    xs.set_global_mesh(mesh)
    parts = llama.batch_parts(mesh)
    sequences = arguments.sequences or parts
    model, optimizer, step, _ = llama.training_step(
        mesh, size=arguments.size, sequences=sequences, length=arguments.length,
        attention=arguments.attention, loop=arguments.loop,
        remat={"True": True, "False": False}.get(arguments.remat, arguments.remat),
    )  # fmt: skip
    initialize(model)
    data = batches(mesh, sequences, arguments.length)
    train(arguments, step, {"model": model, "optimizer": optimizer, "data": data})


if __name__ == "__main__":
    main()
