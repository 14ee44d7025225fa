"""A long loop is written out in the program."""

import torch

import torch_xla

torch.manual_seed(0)
weight = torch.randn(16, 16).to("xla").requires_grad_()
x = torch.randn(4, 16).to("xla")
torch_xla.sync()
for _ in range(5):
    h = x
    for _ in range(70):
        h = torch.tanh(h @ weight)  # HERE
    h.sum().backward()
    weight.grad = None
    torch_xla.sync()
