"""What never changes is sent in each step."""

import torch

import torch_xla

torch.manual_seed(0)
x = torch.randn(512, 512).to("xla")
positions = torch.randn(512, 512)
torch_xla.sync()
for _ in range(20):
    y = (x + positions.to("xla")).sum()  # HERE
    torch_xla.sync()
