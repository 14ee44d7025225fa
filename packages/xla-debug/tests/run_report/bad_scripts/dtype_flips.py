"""NumPy's numbers are float64 in every second batch."""

import numpy
import torch
from torch import nn

import torch_xla

torch.manual_seed(0)
model = nn.Linear(8, 2).to("xla")
torch_xla.sync()
for step in range(6):
    scale = numpy.full((4, 2), 0.5, numpy.float64 if step % 2 else numpy.float32)
    x = torch.ones(4, 8).to("xla")
    y = model(x) * torch.from_numpy(scale).to("xla")  # HERE
    y.sum().backward()
    torch_xla.sync()
