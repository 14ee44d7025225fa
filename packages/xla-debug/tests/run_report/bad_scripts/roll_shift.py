"""The shift of a roll is another one in each step."""

import torch

import torch_xla

x = torch.arange(64.0).to("xla")
torch_xla.sync()
for shift in range(2, 10):
    y = torch.roll(x, shift).sum()  # HERE
    torch_xla.sync()
