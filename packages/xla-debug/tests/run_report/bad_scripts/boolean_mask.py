"""Elements are chosen by a mask: how many there are depends on the data."""

import torch

import torch_xla

torch.manual_seed(0)
torch_xla.sync()
for _ in range(8):
    x = torch.randn(32).to("xla")
    y = x[x > 0].sum()  # HERE
    torch_xla.sync()
