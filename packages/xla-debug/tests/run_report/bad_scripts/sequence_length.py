"""Every batch has a length of its own."""

import torch
from torch import nn

import torch_xla

torch.manual_seed(0)
embedding = nn.Embedding(50, 8).to("xla")
torch_xla.sync()
for length in (10, 13, 17, 21, 24, 30):
    tokens = torch.randint(50, (4, length)).to("xla")
    loss = embedding(tokens).square().mean()  # HERE
    loss.backward()
    torch_xla.sync()
