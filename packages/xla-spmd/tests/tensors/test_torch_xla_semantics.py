"""What torch_xla's SPMD functions give and raise, where scripts rely on it."""

from __future__ import annotations

import copy
import os

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import torch_xla.distributed.spmd as xs
from torch_xla import _XLAC
from xla_spmd.tensors.sharded_tensor import wrap_as_sharded_tensor

DEVICES = 8


def split(mesh, shape=(8, 4), spec=("data", None)):
    tensor = torch.arange(float(np.prod(shape))).reshape(shape).to("xla")
    return tensor, xs.mark_sharding(tensor, mesh, spec)


def test_the_environment_tells_that_devices_are_used_as_one():
    assert os.environ["XLA_USE_SPMD"] == "1"


def test_the_class_wraps_a_tensor():
    made = xs.XLAShardedTensor(
        torch.ones(8, 2), mesh_shape=(4, 2), partition_spec=(0, None), requires_grad=True
    )
    assert made.device.type == "xla" and made.requires_grad and made.tolist() == [[1.0, 1.0]] * 8
    assert made.mesh_shape == (4, 2) and made.partition_spec == (0, None)
    assert made.placements == (Shard(0), Replicate())
    (made * 2).sum().backward()
    assert made.grad.tolist() == [[2.0, 2.0]] * 8
    same = wrap_as_sharded_tensor(made.global_tensor, mesh_shape=(8,), partition_spec=(None, 0))
    assert same.placements == (Shard(1),)


def test_the_spec_is_torchs(mesh):
    _, marked = split(mesh)
    spec = marked._spec
    assert spec.placements == (Shard(0), Replicate()) == marked.placements
    assert tuple(spec.mesh.shape) == (4, 2) and tuple(spec.shape) == (8, 4)


def test_indices_are_lists_with_steps(mesh):
    _, marked = split(mesh)
    assert marked.local_shards[2].indices == [slice(2, 4, 1), slice(0, 4, 1)]
    ((_, (_, indices), *_),) = [_XLAC._get_local_shard_replica_and_indices([marked])[0][:2]]
    assert indices == [slice(0, 2, 1), slice(0, 4, 1)]


@pytest.mark.parametrize("make", [lambda t: t.clone(), copy.deepcopy, lambda t: t.clone().clone()])
@pytest.mark.parametrize("pending", [False, True])
def test_copies_are_split_like_the_original(mesh, make, pending):
    tensor, marked = split(mesh)
    if pending:
        tensor = tensor + 1
        marked = xs.mark_sharding(tensor, mesh, ("data", None))
    spec = _XLAC._get_xla_sharding_spec(tensor)
    assert spec
    for source in (tensor, marked):
        made = make(source)
        assert _XLAC._get_xla_sharding_spec(made) == spec
        assert made.tolist() == tensor.tolist()
    with torch.no_grad():
        made.add_(1)
    assert made.tolist() == (tensor.cpu() + 1).tolist() != tensor.tolist()


def test_a_clone_passes_gradients_on(mesh):
    tensor, _ = split(mesh)
    leaf = tensor.requires_grad_()
    (leaf.clone() * 3).sum().backward()
    assert leaf.grad.tolist() == [[3.0] * 4] * 8


@pytest.mark.parametrize("ids", [[0, 1, 2, 3, 4, 5, 6, 9], [0, 1]])
def test_a_mesh_over_other_devices_is_refused(ids):
    with pytest.raises(
        AssertionError,
        match=r"a mesh names each device of the job once|Device IDs must be less than mesh size",
    ):
        mesh = xs.Mesh(ids, (len(ids),), ("x",))
        xs.mark_sharding(torch.zeros(8, device="xla"), mesh, ("x",))
