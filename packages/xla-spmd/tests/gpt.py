"""A small GPT, the ways to split it, and its training on the CPU and over a mesh."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 64, 32, 8, 2, 8, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.ln1(x)
        q, k, v = (
            f(h).view(*h.shape[:2], HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(att.transpose(1, 2).reshape(h.shape))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, LENGTH + 1)
    return [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(count)]


@dataclasses.dataclass
class Strategy:
    """``spec(name, tensor)`` of each parameter, and that of a batch, on a mesh.

    ``kinds`` are the collectives it needs, ``share`` the part of all parameters a device holds at most.
    """

    mesh_shape: tuple[int, ...]
    axes: tuple[str, ...]
    batch: tuple[str | None, ...]
    kinds: set[str]
    share: float

    def spec(self, name, tensor):
        raise NotImplementedError


class Data(Strategy):
    def spec(self, name, tensor):
        return None


class FullySharded(Strategy):
    def spec(self, name, tensor):
        return ("data",) + (None,) * (tensor.dim() - 1)


COLUMN = ("q.weight", "k.weight", "v.weight", "up.weight", "head.weight", "tokens.weight")
ROW = ("out.weight", "down.weight")


class Tensor(Strategy):
    def spec(self, name, tensor):
        if name.endswith(COLUMN):
            return ("model", None)
        if name.endswith(ROW):
            return (None, "model")
        if name.endswith(("q.bias", "k.bias", "v.bias", "up.bias")):
            return ("model",)
        return None


class TwoDimensional(Strategy):
    def spec(self, name, tensor):
        if name == "tokens.weight":
            return ("model", None)
        if name.endswith(COLUMN):
            return ("model", "data")
        if name.endswith(ROW):
            return ("data", "model")
        if name.endswith(("q.bias", "k.bias", "v.bias", "up.bias")):
            return ("model",)
        return None


STRATEGIES = {
    "data": Data((8,), ("data",), ("data", None), {"all-reduce"}, 1.0),
    # XLA's CPU compiler has no reduce-scatter: it reduces whole gradients and keeps a slice
    "fsdp": FullySharded((8,), ("data",), ("data", None), {"all-gather", "all-reduce"}, 1 / 8),
    "tensor": Tensor((8,), ("model",), (None, None), {"all-reduce"}, 0.15),
    "2d": TwoDimensional(
        (4, 2), ("data", "model"), ("data", None), {"all-gather", "all-reduce"}, 0.2
    ),
}


def build():
    torch.manual_seed(0)
    return GPT()


def loss_of(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train_on_cpu(steps):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for ids in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def shard(model, strategy):
    import torch_xla.distributed.spmd as xs

    mesh = xs.Mesh(np.arange(8), strategy.mesh_shape, strategy.axes)
    for name, parameter in model.named_parameters():
        spec = strategy.spec(name, parameter)
        if spec is not None:
            xs.mark_sharding(parameter, mesh, spec)
    return mesh
