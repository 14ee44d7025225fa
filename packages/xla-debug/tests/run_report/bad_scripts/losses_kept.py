"""Losses of an evaluation are kept with the graphs that would differentiate them."""

import torch
from torch import nn

import torch_xla

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)).to("xla")
batches = [torch.randn(128, 64).to("xla") for _ in range(4)]
torch_xla.sync()
losses = []
for step in range(40):
    loss = model(batches[step % 4]).square().mean()  # HERE
    losses.append(loss)
    torch_xla.sync()
assert len(losses) == 40
