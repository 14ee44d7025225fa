"""An inner loop goes round a number of times that varies."""

import torch

import torch_xla

torch.manual_seed(0)
x = torch.randn(16, 16).to("xla")
torch_xla.sync()
for rounds in (3, 5, 4, 7, 6, 9):
    y = x
    for _ in range(rounds):  # HERE
        y = torch.tanh(y @ x)
    torch_xla.sync()
