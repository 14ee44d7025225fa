"""An operator that the device lacks."""

import torch

import torch_xla

torch.manual_seed(0)
x = torch.randn(64, 64)
x = (x @ x.T + 64 * torch.eye(64)).to("xla")
torch_xla.sync()
for _ in range(12):
    factors, pivots = torch.linalg.ldl_factor(x + 1)  # HERE
    y = factors.sum()
    torch_xla.sync()
