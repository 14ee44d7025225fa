"""Python decides by a value of the device."""

import torch

import torch_xla

torch.manual_seed(0)
torch_xla.sync()
for _ in range(12):
    y = torch.randn(16).to("xla").sum()
    if y > 0:  # HERE
        y = y * 3
    else:
        y = y.exp()
    torch_xla.sync()
