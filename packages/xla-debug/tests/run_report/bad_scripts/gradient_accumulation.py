"""Not a fault: the first of four small batches makes the gradients, the others add to them."""

import torch
from torch import nn

import torch_xla

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 8).to("xla")
torch_xla.sync()
for _ in range(3):
    for _ in range(4):
        model(x).square().mean().backward()
        torch_xla.sync()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
