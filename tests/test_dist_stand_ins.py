"""torch_xla.distributed.fsdp's helpers: collectives that only have shapes, buckets, tensors in containers."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torch_xla.distributed.fsdp import utils, xla_flatten_params_wrapper
from torch_xla.distributed.fsdp import xla_fully_sharded_data_parallel as fsdp


def test_shapes_of_collectives_without_them():
    value = torch.arange(6.0).reshape(2, 3).to("xla")
    gathered = utils.dummy_all_gather(value, 1, groups=[[0, 1], [2, 3]])
    assert torch.equal(gathered.cpu(), value.cpu().repeat(1, 2))
    assert utils.dummy_all_gather(value).shape == (2, 3)
    assert torch.equal(utils.dummy_all_reduce("sum", value, 0.5).cpu(), value.cpu() * 0.5)
    tensors = [torch.ones(2, device="xla"), torch.ones(3, device="xla")]
    assert utils.dummy_all_reduce("sum", tensors, 2.0) is tensors
    assert [t.tolist() for t in tensors] == [[2.0] * 2, [2.0] * 3]
    parts = []
    scatter = utils.DummyReduceScatter(2)
    scatter(value, parts.append)
    scatter.flush()
    assert [p.tolist() for p in parts] == [[[0.0, 1.0, 2.0]]]


def test_buckets_are_flushed_when_they_are_full():
    parts = []
    scatter = utils.BucketizedReduceScatter(16 / 2**20, 1, None, True)
    scatter(torch.ones(3, device="xla"), lambda part: parts.append(("a", part)))
    assert not parts
    scatter(torch.ones(2, device="xla") * 2, lambda part: parts.append(("b", part)))
    assert [name for name, _ in parts] == ["a"]
    scatter.flush()
    scatter.flush()
    assert [(n, p.tolist()) for n, p in parts] == [("a", [1.0] * 3), ("b", [2.0] * 2)]


def test_tensors_in_containers():
    tree = {"a": torch.ones(1), "b": [torch.zeros(2), "text"], "c": (3, None)}
    doubled = fsdp.apply_to_tensors(lambda t: t + 1, tree)
    assert doubled["a"].tolist() == [2.0]
    assert doubled["b"][1] == "text"
    assert [t.shape[0] for t in fsdp.collect_tensors(tree)] == [1, 2]


def test_prefixes_of_state_dicts():
    state = {"module.a": 1, "module.b": 2, "other": 3}
    xla_flatten_params_wrapper.replace_by_prefix_(state, "module.", "")
    assert state == {"a": 1, "b": 2, "other": 3}
    with pytest.raises(ValueError, match="both prefixes"):
        xla_flatten_params_wrapper.replace_by_prefix_(state, "a", "a")


def test_linear_layers_with_torch_xlas_forward():
    pytest.importorskip("xla_spmd")
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(2, 5, 3)
    expected = model(x)
    model = utils.apply_xla_patch_to_nn_linear(model.to("xla"))
    found = model(x.to("xla"))
    torch.testing.assert_close(found.cpu(), expected)
    found.sum().backward()
    assert model[0].weight.grad.shape == (4, 3)
    calls = []
    utils.apply_xla_patch_to_nn_linear(model, lambda m, x: calls.append(m) or x @ m.weight.t())
    model(x.to("xla"))
    assert calls == [model[0], model[2]]


def test_the_former_name_of_the_place_to_meet():
    for _ in range(2):
        importlib.reload(importlib.import_module("torch_xla.experimental.pjrt_backend"))
    store, rank, world = next(dist.rendezvous("pjrt://"))
    store.set("key", "value")
    assert (store.get("key"), rank, world) == (b"value", 0, 1)
