"""The hidden state carries the graphs of all steps before."""

import torch
from torch import nn

import torch_xla

torch.manual_seed(0)
cell = nn.RNNCell(8, 8).to("xla")
inputs = torch.randn(4, 8).to("xla")
hidden = torch.zeros(4, 8).to("xla")
torch_xla.sync()
for _ in range(8):
    hidden = cell(inputs, hidden)  # HERE
    hidden.square().mean().backward(retain_graph=True)
    torch_xla.sync()
