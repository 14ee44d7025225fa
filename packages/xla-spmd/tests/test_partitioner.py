"""What XLA's partitioner would compute wrongly by itself, though sizes divide."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import torch_xla
import torch_xla.distributed.spmd as xs
from xla_core.compilation import program_table

CASES = {
    # windows of one value, filled with zeros and with something else
    "scans": ((8, 6), lambda a: (a.cumsum(0), a.cumprod(0), a.logcumsumexp(0))),
    "pads": ((8, 6), lambda a: (F.pad(a, (0, 0, 1, 2)), F.pad(a, (0, 0, 1, 2), value=3.0))),
    "pools": (
        (1, 2, 16, 4),
        lambda a: (
            F.avg_pool2d(a, 3, 1, 1),
            F.max_pool2d(a - 9, 3, 1, 1),
            F.max_pool2d(a, 3, 1, 1),
        ),
    ),
    # strided slices: their gradients put zeros between elements
    "strides": ((16, 6), lambda a: (a[::2] * 2, a[1:] * 3, a[1::3].sum())),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    shape, function = CASES[name]
    line = xs.Mesh(np.arange(8), (8,), ("data",))
    host = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    device = host.to("xla")
    dimension = shape.index(max(shape))
    xs.mark_sharding(device, line, ["data" if i == dimension else None for i in range(len(shape))])
    both = [function(t.requires_grad_()) for t in (host, device)]
    for results in both:
        sum((r * r).sum() for r in results).backward()
    torch_xla.sync()
    for a, b in [*zip(*both, strict=True), (host.grad, device.grad)]:
        torch.testing.assert_close(b.detach().cpu(), a.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [11, 3])
def test_a_scatter_adds_its_updates_only(mesh, rows):
    """Rows of updates that do not divide: nothing that lies behind them is added to a row."""
    index = torch.arange(rows) % 2
    host, device = torch.zeros(2, 7), torch.zeros(2, 7).to("xla")
    for table in (host, device):
        updates = torch.ones(rows, 7).to(table.device)
        if table is device:
            xs.mark_sharding(updates, mesh, ("data", None))
        table.index_add_(0, index.to(table.device), updates.cos())
    torch.testing.assert_close(device.cpu(), host)


def test_one_filling_needs_no_barrier(mesh):
    tensor = torch.ones(8, 6).to("xla")
    xs.mark_sharding(tensor, mesh, ("data", None))
    total = tensor.cumsum(0) + F.pad(tensor, (1, -1))
    torch_xla.sync()
    assert total.cpu()[1, 1] == 3
    assert "opt-barrier" not in program_table.all_programs()[-1].executable.optimized_hlo()
