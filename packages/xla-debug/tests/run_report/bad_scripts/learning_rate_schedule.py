"""Not a fault: a schedule's number is an argument of the program."""

import torch
from torch import nn

import torch_xla

torch.manual_seed(0)
model = nn.Linear(8, 2).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
x = torch.randn(32, 8).to("xla")
torch_xla.sync()
for _ in range(12):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    torch_xla.sync()
    schedule.step()
