"""Not a fault: a program for training and one for evaluation."""

import torch
from torch import nn

import torch_xla

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2)).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 8).to("xla")
torch_xla.sync()
for _ in range(3):
    model.train()
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        torch_xla.sync()
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            y = model(x).argmax(1)
            torch_xla.sync()
