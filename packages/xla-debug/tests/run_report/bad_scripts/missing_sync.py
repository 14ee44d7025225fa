"""Sixty optimizer steps, and nothing ends one."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 1).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 8).to("xla")
for _ in range(60):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()  # HERE
print(f"{loss.item():.3f}")
