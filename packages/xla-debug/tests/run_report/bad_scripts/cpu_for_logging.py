"""A value is copied for the log in each step."""

import torch
from torch import nn

import torch_xla

torch.manual_seed(0)
model = nn.Linear(256, 256).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(256, 256).to("xla")
torch_xla.sync()
log = []
for _ in range(20):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    log.append(loss.detach().cpu())  # HERE
