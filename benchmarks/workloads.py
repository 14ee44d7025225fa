"""The measured training steps, written as users write them, for any device.

Each workload is a function from a device to a step: a callable without arguments that does one
training step on batches already on the device and returns the loss. Whoever calls a step decides
when to sync. Seeds and data are fixed and drawn on the CPU, so every system does the same sums.
This file must also run on torch 2.9 (the last one with an official torch_xla).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F

from models import GPT, LSTMClassifier, ResNet

Step = Callable[[], torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor]

BATCHES = 4
"""Different batches a step goes round: enough that no system can take them for constants."""

GPT_HEADS = 4
RATE, WEIGHT_DECAY = 3e-4, 0.1
"""Of AdamW on the GPTs; the rate is a share of this at every step."""


def image_batches(
    device: torch.device, size: int, shape: tuple[int, ...], classes: int
) -> Iterator[Batch]:
    """Endless (float32 (size, *shape), int64 (size,)) pairs on ``device``."""
    batches = [
        (torch.randn(size, *shape).to(device), torch.randint(classes, (size,)).to(device))
        for _ in range(BATCHES)
    ]
    return itertools.cycle(batches)


def token_batches(device: torch.device, size: int, length: int, vocabulary: int) -> Iterator[Batch]:
    """Endless int64 (size, length) pairs on ``device``: tokens, and the tokens that follow them."""
    texts = [torch.randint(vocabulary, (size, length + 1)) for _ in range(BATCHES)]
    return itertools.cycle([(t[:, :-1].to(device), t[:, 1:].to(device)) for t in texts])


def on_batches(
    train: Callable[..., torch.Tensor], batches: Iterator[tuple[torch.Tensor, ...]]
) -> Step:
    """A step that trains on the next of ``batches``; its attributes are what it was made of."""

    def step() -> torch.Tensor:
        return train(*next(batches))

    step.train, step.batches = train, batches  # type: ignore[attr-defined]
    return step


def classifier_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Batch]
) -> Step:
    """The usual training step of a classifier."""
    model.train()

    def train(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss

    return on_batches(train, batches)


def mnist_cnn(device: torch.device) -> Step:
    """Two convolutions and two linear layers on (64, 1, 28, 28), SGD with momentum."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return classifier_step(model, optimizer, image_batches(device, 64, (1, 28, 28), 10))


def mlp_adam(device: torch.device, depth: int = 8) -> Step:
    """``depth`` linear layers of width 128 on (64, 128), Adam."""
    layers: list[nn.Module] = []
    for _ in range(depth - 1):
        layers += [nn.Linear(128, 128), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return classifier_step(model, optimizer, image_batches(device, 64, (128,), 10))


def resnet18(device: torch.device) -> Step:
    """ResNet-18 of width 16 on (16, 3, 32, 32), SGD with momentum and weight decay."""
    return resnet_step(ResNet(width=16, classes=10), device)


def resnet50(device: torch.device) -> Step:
    """ResNet-50 of width 16 on (16, 3, 32, 32), SGD with momentum and weight decay."""
    model = ResNet(width=16, classes=10, blocks=(3, 4, 6, 3), bottleneck=True)
    # at ResNet-18's rate the eager CPU's own float64 is 5 % from its float32 after four steps
    return resnet_step(model, device, rate=1e-4)


def resnet_step(model: nn.Module, device: torch.device, rate: float = 0.01) -> Step:
    """One step of SGD with momentum and weight decay."""
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
    return classifier_step(model, optimizer, image_batches(device, 16, (3, 32, 32), 10))


def resnet18_inference(device: torch.device) -> Step:
    """ResNet-18 of width 16 on (16, 3, 32, 32), in evaluation without gradients."""
    model = ResNet(width=16, classes=10).to(device).eval()

    @torch.no_grad()
    def infer(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        del labels
        return model(inputs).logsumexp(1).mean()

    return on_batches(infer, image_batches(device, 16, (3, 32, 32), 10))


def warmup_then_cosine(step: int) -> float:
    """The share of the learning rate that step number ``step`` takes."""
    if step < 10:
        return (step + 1) / 10
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(step / 5000, 1.0)))


def gpt_step(model: GPT, batches: Iterator[Batch]) -> Step:
    """One step of AdamW; the learning rate is another one at every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine)
    model.train()

    def train(tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), following.reshape(-1))
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss

    return on_batches(train, batches)


def gpt_4_layers(device: torch.device) -> Step:
    """GPT d=128, 4 layers, 4 heads, 64 tokens, batch 8, AdamW with a schedule."""
    model = GPT(vocabulary=256, width=128, layers=4, heads=GPT_HEADS, length=64).to(device)
    return gpt_step(model, token_batches(device, 8, 64, 256))


def small_gpt_parts(device: torch.device, layers: int) -> tuple[GPT, Iterator[Batch]]:
    """GPT d=64, 4 heads, 32 tokens, batch 2: the model, and its batches."""
    model = GPT(vocabulary=256, width=64, layers=layers, heads=GPT_HEADS, length=32).to(device)
    return model, token_batches(device, 2, 32, 256)


def small_gpt(device: torch.device, layers: int) -> Step:
    """``small_gpt_parts``, AdamW with a schedule."""
    return gpt_step(*small_gpt_parts(device, layers))


def lstm(device: torch.device, steps: int) -> Step:
    """LSTMCell (32 -> 64) over (16, steps, 32), a linear head, Adam."""
    model = LSTMClassifier(features=32, hidden=64, classes=10).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return classifier_step(model, optimizer, image_batches(device, 16, (steps, 32), 10))


def views_loop(device: torch.device) -> Step:
    """Eight rounds of slices, views and in-place updates on a (64, 64) state, without gradients."""
    state = torch.randn(64, 64).to(device)
    updates = itertools.cycle([(torch.randn(8, 64).to(device),) for _ in range(BATCHES)])

    @torch.no_grad()
    def change(update: torch.Tensor) -> torch.Tensor:
        for i in range(8):
            state[i].mul_(0.9).add_(update[i], alpha=0.1)
            state[:, i].clamp_(-3.0, 3.0)
            state.view(8, 8, 64)[i, :, 1::2] -= 0.01
            state.t()[i, 32:].copy_(update[i, :32])
        return state.square().mean()

    return on_batches(change, updates)


SMALL_GPTS = {f"gpt_{layers}_layers": layers for layers in (12, 24, 48, 96)}
"""Layers of the GPTs that ``jax_gpt.py`` has in jax, too."""

WORKLOADS: dict[str, Callable[[torch.device], Step]] = {
    "mnist_cnn": mnist_cnn,
    "mlp_adam": mlp_adam,
    "resnet18": resnet18,
    "resnet18_inference": resnet18_inference,
    "gpt_4_layers": gpt_4_layers,
    "gpt_12_layers": functools.partial(small_gpt, layers=12),
    "lstm_32_steps": functools.partial(lstm, steps=32),
    "views_loop": views_loop,
}
"""The workloads that are measured by default, in the order of the table."""

DEPTH_WORKLOADS: dict[str, Callable[[torch.device], Step]] = {
    **{name: functools.partial(small_gpt, layers=layers) for name, layers in SMALL_GPTS.items()},
    "lstm_32_steps": functools.partial(lstm, steps=32),
    "lstm_128_steps": functools.partial(lstm, steps=128),
    "resnet18": resnet18,
    "resnet50": resnet50,
    "mlp_adam": mlp_adam,
    "mlp_64_layers": functools.partial(mlp_adam, depth=64),
}
"""The workloads of ``--depth``: the same models, shallow and deep."""

ALL_WORKLOADS = {**WORKLOADS, **DEPTH_WORKLOADS}


def build(name: str, device: torch.device) -> Step:
    """The step of workload ``name`` on ``device``, from the same seed each time."""
    torch.manual_seed(0)
    return ALL_WORKLOADS[name](device)
