"""``distribute_module`` over a mesh of processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from xla_core.torch_features import process_mesh


@pytest.fixture
def mesh():
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_tied_parameters_and_buffers_stay_tied(mesh, monkeypatch):
    from torch.distributed.tensor import DTensor, distribute_tensor

    monkeypatch.setattr(process_mesh, "distribute_tensor", distribute_tensor)
    module = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    module[1].weight = module[0].weight
    module[1].same = module[1].weight
    module.register_buffer("scale", torch.ones(2))
    module[0].register_buffer("scale", module.scale)
    process_mesh.distribute_module(module, mesh)
    assert isinstance(module[0].weight, DTensor) and isinstance(module.scale, DTensor)
    assert module[0].weight is module[1].weight is module[1].same
    assert module.scale is module[0].scale
    assert len(list(module.parameters())) == 1
