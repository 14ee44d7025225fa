"""Three syncs in one step."""

import torch
from torch import nn

import torch_xla

torch.manual_seed(0)
model = nn.Linear(8, 2).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 8).to("xla")
torch_xla.sync()
for _ in range(20):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    torch_xla.sync()  # HERE
    loss.backward()
    torch_xla.sync()
    optimizer.step()
    torch_xla.sync()
