"""The last batch is smaller."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_xla

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(100, 8)), batch_size=32)
model = nn.Linear(8, 2).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x.to("xla")).square().mean().backward()  # HERE
        optimizer.step()
        torch_xla.sync()
