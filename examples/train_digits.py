"""Trains a small convolutional network on handwritten digits, on the ``xla`` device.

Without ``--data`` the digits are scikit-learn's (1,797 real scans of 8x8 pixels, every fifth held
out). ``--data DIR`` reads MNIST's four IDX files (``train-images-idx3-ubyte`` and so on, plain or
``.gz``) from DIR instead; the test files are then what is held out.
"""

from __future__ import annotations

import argparse
import gzip
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import torch_xla
import torch_xla.runtime as xr
from torch_xla.experimental.capture import capture
from xla_core.extension_api.programs import fallback_counts, program_runs

HELD_OUT_EVERY = 5
IDX_TYPE_UINT8 = 0x08
NO_LABEL = -1
"""Label of the images that fill up the last batch of an evaluation: equal to no prediction."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with MNIST's IDX files")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of the first epoch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="xla", help="xla, xla:1, ... or cpu (default: xla)")
    parser.add_argument("--cache", help="folder that keeps compiled programs between runs")
    parser.add_argument(
        "--capture", action="store_true", help="record each kind of step once, and replay it"
    )
    return parser.parse_args(argv)


def read_idx(path: Path) -> torch.Tensor:
    """A uint8 tensor from an IDX file: two zero bytes, type, rank, big-endian sizes, values.

    Reads ``path`` or, where that does not exist, ``path`` with ``.gz`` appended. Raises
    FileNotFoundError if neither is there, ValueError for a file of another kind.
    """
    packed = path.with_name(path.name + ".gz")
    if not path.exists() and not packed.exists():
        raise FileNotFoundError(
            f"neither {path} nor {packed.name} exists: --data needs MNIST's four"
        )
    content = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    zero, kind, rank = struct.unpack_from(">HBB", content)
    if zero != 0 or kind != IDX_TYPE_UINT8:
        raise ValueError(
            f"{path} is no IDX file of unsigned bytes (it starts with {content[:4]!r})"
        )
    shape = struct.unpack_from(f">{rank}I", content, 4)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * rank)
    return torch.from_numpy(values.reshape(shape).copy())


def load_mnist(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """MNIST's training and test sets: images (N, 1, 28, 28) in 0..1, labels int64."""

    def split(name: str) -> TensorDataset:
        images = read_idx(folder / f"{name}-images-idx3-ubyte")
        labels = read_idx(folder / f"{name}-labels-idx1-ubyte")
        return TensorDataset(images.unsqueeze(1).float() / 255, labels.long())

    return split("train"), split("t10k")


def load_small_digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's digits, shuffled by ``seed``: four fifths to train on, one held out."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out = torch.arange(len(labels)) % HELD_OUT_EVERY == 0
    train, test = order[~held_out], order[held_out]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class DigitNet(nn.Module):
    """Two convolutions and two linear layers; ``size`` is the images' height and width."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.dropout = nn.Dropout(0.25)
        self.hidden = nn.Linear(64 * (size // 2) ** 2, 128)
        self.out = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (N, 10) of images (N, 1, size, size)."""
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        x = self.dropout(F.max_pool2d(x, 2).flatten(1))
        return self.out(F.relu(self.hidden(x)))


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """A step of training: from images and labels to the loss."""

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def evaluation_step(model: nn.Module) -> Step:
    """A step of evaluation: from images and labels to the number of images that are labelled correctly."""

    @torch.no_grad()
    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (model(images).argmax(dim=1) == labels).sum()

    return step


def train_epoch(
    step: Step,
    loader: DataLoader[tuple[torch.Tensor, ...]],
    device: torch.device,
    title: str,
) -> float:
    """One pass over ``loader``; returns the mean loss."""
    losses = []
    for images, labels in tqdm(loader, desc=title, unit="batch", leave=False):
        loss = step(images.to(device), labels.to(device))
        torch_xla.sync()
        # Kept on the device: reading it here would wait for this step before tracing the next.
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


def accuracy(
    step: Step,
    dataset: TensorDataset,
    batch_size: int,
    device: torch.device,
) -> float:
    """The share of ``dataset`` that is labelled correctly, as ``step`` counts."""
    hits = []
    for images, labels in DataLoader(dataset, batch_size):
        # The last batch is filled up: another shape would be another program to compile.
        missing = batch_size - len(labels)
        images = F.pad(images, (0, 0, 0, 0, 0, 0, 0, missing)).to(device)
        labels = F.pad(labels, (0, missing), value=NO_LABEL).to(device)
        hits.append(step(images, labels))
        torch_xla.sync()
    return torch.stack(hits).sum().item() / len(dataset)


def print_report() -> None:
    """What was compiled, how often it ran, and what the device left to the CPU."""
    programs = program_runs()
    seconds = sum(program.compile_seconds for program in programs)
    cached = sum(program.from_cache for program in programs)
    compiled = len(programs) - cached
    print(f"\n{compiled} programs compiled, {cached} found in the cache, in {seconds:.1f} s:")
    for program in sorted(programs, key=lambda program: -program.runs):
        print(f"  {program.name}: {program.operations} operations, ran {program.runs} times")
    fallbacks = fallback_counts()
    if not fallbacks:
        print("Nothing fell back to the CPU.")
    for name, count in sorted(fallbacks.items()):
        print(f"Fell back to the CPU: {name}, {count} times")


def main(argv: Sequence[str] | None = None) -> float:
    """Train as the command line says; returns the held-out accuracy after the last epoch."""
    options = parse_arguments(argv)
    started = time.perf_counter()
    if options.cache:
        xr.initialize_cache(options.cache)
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    if device.type == "xla":
        device = torch_xla.device(device.index)
        torch_xla.manual_seed(options.seed)

    train, test = load_mnist(options.data) if options.data else load_small_digits(options.seed)
    # Batches of one size: the incomplete last one is dropped, other images miss it each epoch.
    loader = DataLoader(train, options.batch_size, shuffle=True, drop_last=True)
    model = DigitNet(size=train.tensors[0].shape[-1]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs)
    train_step, count_hits = training_step(model, optimizer), evaluation_step(model)
    if options.capture:
        train_step, count_hits = capture(train_step), capture(count_hits)
    print(f"{len(train)} digits to train on, {len(test)} held out, on {device}")

    share = 0.0
    for epoch in range(1, options.epochs + 1):
        title = f"epoch {epoch}/{options.epochs}"
        begin = time.perf_counter()
        model.train()
        loss = train_epoch(train_step, loader, device, title)
        seconds = time.perf_counter() - begin
        schedule.step()
        model.eval()
        share = accuracy(count_hits, test, options.batch_size, device)
        tqdm.write(
            f"{title}: train loss {loss:.4f}, held-out accuracy {share:.2%}, {seconds:.2f} s of training"
        )

    print(f"Held-out accuracy {share:.2%} after {time.perf_counter() - started:.1f} s")
    if device.type == "xla":
        print_report()
    return share


if __name__ == "__main__":
    main()
