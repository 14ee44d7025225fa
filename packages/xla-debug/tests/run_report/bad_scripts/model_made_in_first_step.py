"""The model's values are made in the program of the first step."""

import torch
from torch import nn

import torch_xla

torch.manual_seed(0)
with torch.device("xla"):
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])  # HERE
    x = torch.randn(32, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    torch_xla.sync()
