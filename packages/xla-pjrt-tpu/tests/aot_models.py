"""Run as a script: traces one training step of three models for a TPU, and writes down their programs.

Usage: aot_models.py TOPOLOGY FILE. Each model's program and its figures are pickled; the tests compile
the programs for other topologies, so that each model is traced once.
"""

from __future__ import annotations

import functools
import pickle
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import torch_xla
from xla_core import aot, programs, report


class DigitNet(nn.Module):
    """The network of examples/train_digits.py for images of 8x8."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.dropout = nn.Dropout(0.25)
        self.hidden = nn.Linear(64 * 4 * 4, 128)
        self.out = nn.Linear(128, 10)

    def forward(self, images):
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        x = self.dropout(F.max_pool2d(x, 2).flatten(1))
        return self.out(F.relu(self.hidden(x)))


class Residual(nn.Module):
    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18():
    """ResNet-18 (He et al. 2015) with the stem for images of 32x32; 11 M parameters."""
    layers = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    channels = 64
    for stage in range(4):
        for number in range(2):
            stride = 2 if stage and not number else 1
            layers.append(Residual(channels, 64 * 2**stage, stride))
            channels = 64 * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        n, t, d = x.shape
        parts = self.qkv(self.norm1(x)).split(d, dim=2)
        q, k, v = (p.view(n, t, self.heads, d // self.heads).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, d))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions."""

    def __init__(self, vocabulary, width, layers, heads, length):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


def mlp():
    """Two layers of 2048 and 8192 units: small enough to compile fast, and little but weights."""
    return nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 2048))


def with_state(optimizer):
    """Give an optimizer the state that its first step makes, so that the step is a later one."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state[parameter]
        if isinstance(optimizer, torch.optim.Adam):
            state["step"] = torch.tensor(1.0)
            state["exp_avg"] = torch.empty_like(parameter)
            state["exp_avg_sq"] = torch.empty_like(parameter)
        elif optimizer.defaults["momentum"]:
            state["momentum_buffer"] = torch.empty_like(parameter)
    return optimizer


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))


def step(model, optimizer, inputs, targets, loss_of=cross_entropy):
    """One training step: its program, and what the compiler says of it."""
    optimizer.zero_grad()
    loss = loss_of(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    made = programs.all_programs()[-1]
    assert made.inputs == made.program.inputs
    executable = made.executable
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "program": made.program,
        "parameter_bytes": parameters,
        "memory": executable.memory_analysis(),
        "cost": executable.cost_analysis(),
        "hlo": executable.optimized_hlo(),
        "figures": report.program_figures()[-1],
    }


def shape(*sizes, dtype=torch.float32):
    return torch.empty(sizes, dtype=dtype, device="meta").to("xla")


def cases():
    """Name, model, optimizer, inputs, targets and loss of each step; shapes only."""
    with torch.device("meta"):
        digits, resnet, gpt, wide = DigitNet(), resnet18(), GPT(512, 128, 4, 4, 64), mlp()
    labels, label = shape(64, dtype=torch.int64), shape(1, dtype=torch.int64)
    tokens = shape(8, 64, dtype=torch.int64)
    adam = functools.partial(torch.optim.Adam, lr=1e-3)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    heavy = functools.partial(sgd, momentum=0.9)
    yield "digits", digits, adam, shape(64, 1, 8, 8), labels, cross_entropy
    yield "resnet18", resnet, sgd, shape(1, 3, 32, 32), label, cross_entropy
    yield "gpt", gpt, sgd, tokens, shape(8, 64, dtype=torch.int64), cross_entropy
    yield "mlp", wide, heavy, shape(512, 2048), shape(512, 2048), F.mse_loss


def trace_all():
    made = {}
    for name, model, optimizer, inputs, targets, loss_of in cases():
        model.to_empty(device="xla")
        trained = with_state(optimizer(model.parameters()))
        made[name] = step(model, trained, inputs, targets, loss_of)
    return made


def main():
    topology, path = sys.argv[1:]
    aot.use_topology(topology)
    Path(path).write_bytes(pickle.dumps(trace_all()))


if __name__ == "__main__":
    main()
