"""Steps that compile in seconds, for the tests."""

from __future__ import annotations

import torch
from torch import nn

import torch_xla.distributed.spmd as xs


def product(mesh, *, size=8192):
    """One product of square matrices in bfloat16, on every chip by itself."""
    layer = nn.Linear(size, size, bias=False, device="meta", dtype=torch.bfloat16)
    layer.to_empty(device="xla")
    x = torch.empty(size, size, device="meta", dtype=torch.bfloat16).to("xla")

    def step():
        with torch.no_grad():
            return layer(x)

    return layer, None, step


def mlp(mesh, *, width=512, rows=256, layers=2, state=torch.float32):
    """Linear layers with SGD and momentum, over the mesh's axis ``fsdp`` if it has one."""
    model = nn.Sequential(*(nn.Linear(width, width, device="meta") for _ in range(layers)))
    model.to_empty(device="xla")
    x = torch.empty(rows, width, device="meta").to("xla")
    for tensor in (x, *model.parameters()):
        xs.mark_sharding(tensor, mesh, ("fsdp", *[None] * (tensor.dim() - 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def nothing(mesh):
    """Not what a step function returns."""
    return mesh


def idle(mesh):
    """A step that records nothing."""
    layer = nn.Linear(4, 4, device="meta")
    layer.to_empty(device="xla")
    return layer, None, lambda: None


def broken(mesh):
    """A step that fails when it is built."""
    raise RuntimeError("no such layer")
