"""A schedule's number is part of the program."""

import torch

import torch_xla

torch.manual_seed(0)
weight = torch.randn(16, 16).to("xla")
torch_xla.sync()
for step in range(6):
    power = 2.0 + 0.1 * step
    weight = torch.nn.functional.normalize(weight, p=power)  # HERE
    torch_xla.sync()
