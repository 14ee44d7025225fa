"""Trains on handwritten digits in many processes, each on its own part of every batch.

    CPU_NUM_DEVICES=2 python examples/train_digits_distributed.py
    torchrun --nproc-per-node 2 examples/train_digits_distributed.py

Both do the same: the first starts the processes itself, in the second torchrun has. The digits are
scikit-learn's, every fifth held out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.runtime as xr

HELD_OUT_EVERY = 5


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    parser.add_argument("--lr", type=float, default=0.1)
    return parser.parse_args(argv)


def load_parts() -> tuple[TensorDataset, TensorDataset]:
    """Digits to train on, and those held out."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    held_out = torch.arange(len(labels)) % HELD_OUT_EVERY == 0
    return (
        TensorDataset(images[~held_out], labels[~held_out]),
        TensorDataset(images[held_out], labels[held_out]),
    )


def make_network() -> nn.Module:
    """A small convolutional network for images (N, 1, 8, 8)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(576, 10),
    )  # fmt: skip


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: pl.MpDeviceLoader
) -> float:
    """One pass over this process's part; the mean loss over all processes."""
    losses = []
    for images, labels in loader:  # each iteration ends the step before
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        xm.optimizer_step(optimizer)
        losses.append(loss.detach())
    mean = xm.all_reduce(xm.REDUCE_SUM, torch.stack(losses).mean(), scale=1 / xr.world_size())
    return mean.item()


@torch.no_grad()
def accuracy(model: nn.Module, held_out: TensorDataset, device: torch.device) -> float:
    """The share of the held-out digits that is labelled correctly; each process counts its own."""
    images, labels = (part[xr.global_ordinal() :: xr.world_size()] for part in held_out.tensors)
    hits = (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum().item()
    return xm.mesh_reduce("hits", hits, sum) / len(held_out)


def train(index: int, options: argparse.Namespace) -> None:
    """What each process runs."""
    del index
    device = torch_xla.device()
    torch.manual_seed(0)  # the same network everywhere
    model = make_network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    data, held_out = load_parts()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        data, num_replicas=xr.world_size(), rank=xr.global_ordinal(), drop_last=True
    )
    batch_size = options.batch_size // xr.world_size()
    loader = DataLoader(data, batch_size, sampler=sampler, drop_last=True)
    xm.master_print(f"{xr.world_size()} processes, {batch_size} digits each in a step", flush=True)
    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, optimizer, pl.MpDeviceLoader(loader, device))
        share = accuracy(model, held_out, device)
        text = f"epoch {epoch}: train loss {loss:.4f}, held-out accuracy {share:.2%}"
        xm.master_print(text, flush=True)


if __name__ == "__main__":
    torch_xla.launch(train, args=(parse_arguments(None),))
