"""The end of a slice is another one in each step."""

import torch

import torch_xla

x = torch.arange(64.0).to("xla")
torch_xla.sync()
for end in range(2, 10):
    y = x[:end].sum()  # HERE
    torch_xla.sync()
