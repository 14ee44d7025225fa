"""The places of elements are asked for: how many there are depends on the data."""

import torch

import torch_xla

torch.manual_seed(0)
torch_xla.sync()
for _ in range(8):
    x = torch.randn(32).to("xla")
    places = torch.nonzero(x > 0)  # HERE
    y = (places * 2).sum()
    torch_xla.sync()
