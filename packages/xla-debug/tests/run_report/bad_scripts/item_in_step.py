"""A value is read between the forward pass and the backward pass."""

import torch
from torch import nn

import torch_xla

torch.manual_seed(0)
model = nn.Linear(8, 2).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 8).to("xla")
torch_xla.sync()
total = 0.0
for _ in range(20):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    total += loss.item()  # HERE
    loss.backward()
    optimizer.step()
    torch_xla.sync()
