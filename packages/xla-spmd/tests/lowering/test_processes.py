"""Two processes with four devices each, as one mesh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

PROGRAM = """
import sys
import numpy as np, torch, torch_xla
import torch_xla.runtime as xr
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from xla_core.extension_api.tensors import send_cpu_data_to_device
from xla_spmd.reports import program_report

xr.use_spmd()
assert (xr.global_runtime_device_count(), xr.addressable_runtime_device_count()) == (8, 4)
assert (xr.process_count(), xr.world_size(), len(torch_xla.devices())) == (2, 1, 1)
assert xm.is_master_ordinal(local=False) == (xr.process_index() == 0)
mesh = xs.Mesh(np.arange(8), (4, 2), ("data", "model"))

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)).to("xla")
xs.mark_sharding(model[0].weight, mesh, ("model", "data"))
xs.mark_sharding(model[2].weight, mesh, ("data", "model"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(1)
spec = xs.ShardingSpec(mesh, ("data", None), minibatch=True)
losses = []
for step in range(3):
    batch = torch.randn(8, 16, generator=generator)
    mine = batch.chunk(2)[xr.process_index()]
    x = send_cpu_data_to_device(mine, "xla", spec)
    assert x.shape == (8, 16)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    losses.append(loss.item())
assert len(program_report.parameter_shares(model)["parameters"]) == 4
weight = model[0].weight
shards = xs.wrap_if_sharded(weight).local_shards
assert len(shards) == 4 and shards[0].data.shape == (16, 4)
whole = weight.detach().cpu()
for shard in shards:
    torch.testing.assert_close(whole[tuple(shard.indices)], shard.data)
moved = xs.mark_sharding(weight, mesh, (None, "data"))
torch.testing.assert_close(moved.detach().cpu(), whole)
print("LOSSES", *losses)
"""


def losses_on_one_device():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_two_processes_with_four_devices_each_train_as_one(run_hosts, tmp_path):
    script = Path(tmp_path / "train.py")
    script.write_text(PROGRAM)
    printed = run_hosts(str(script))
    found = [
        [float(n) for n in line.split()[1:]]
        for output in printed
        for line in output.splitlines()
        if line.startswith("LOSSES")
    ]
    assert found[0] == found[1]
    # sums over devices are added in another order
    assert found[0] == pytest.approx(losses_on_one_device(), rel=1e-5)
