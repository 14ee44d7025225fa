"""``_XLAC``'s shardings: made of lists, marked, by hand, from shards on the CPU; against PyTorch on the CPU."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

import torch_xla
import torch_xla.distributed.spmd as xs
from torch_xla import _XLAC

VALUES = torch.arange(64.0).reshape(8, 8)
TILED, PARTIAL, REPLICATED, MANUAL = (
    int(kind)
    for kind in (
        xs.ShardingType.TILED, xs.ShardingType.PARTIAL, xs.ShardingType.REPLICATED,
        xs.ShardingType.MANUAL,
    )
)  # fmt: skip
GRID = np.arange(8).reshape(4, 2).tolist()


def tiled():
    return _XLAC.OpSharding(GRID, [], [], TILED)


def test_shardings_are_made_of_lists(mesh):
    assert tiled().text == "{devices=[4,2]0,1,2,3,4,5,6,7}"
    assert tiled() == mesh.get_op_sharding(("data", "model"))
    assert isinstance(mesh.get_op_sharding(("data", None)), _XLAC.OpSharding)
    assert _XLAC.OpSharding([], [], [], REPLICATED).text == "{replicated}"
    partial = _XLAC.OpSharding(
        GRID, [[0], [1], [2], [3]], [[0, 1], [2, 3], [4, 5], [6, 7]], PARTIAL
    )
    assert partial == mesh.get_op_sharding(("data", None))
    last = _XLAC.OpSharding([[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]], [], [], PARTIAL)
    assert last == partial
    with pytest.raises(ValueError, match="replication_groups"):
        _XLAC.OpSharding(GRID, [[0], [1]], [[0, 1], [2]], PARTIAL)


def test_marking_by_a_sharding(mesh):
    t = VALUES.to("xla")
    assert _XLAC._get_xla_op_sharding(t) is None
    _XLAC._xla_mark_sharding(t, tiled())
    assert _XLAC._get_xla_op_sharding(t) == tiled()
    other = xs.mark_sharding(VALUES.to("xla"), mesh, ("data", "model"))
    assert _XLAC._get_xla_sharding_spec(t) == _XLAC._get_xla_sharding_spec(other)
    torch.testing.assert_close((t @ t).cpu(), VALUES @ VALUES)
    pending = VALUES.to("xla") + 1
    _XLAC._xla_annotate_custom_sharding(pending, tiled())
    assert torch.equal(pending.cpu(), VALUES + 1)
    with pytest.raises(ValueError, match="does not fit a tensor of shape"):
        _XLAC._xla_mark_sharding(torch.ones(8).to("xla"), tiled())
    with pytest.raises(ValueError, match="name each device of the job once"):
        _XLAC._xla_mark_sharding(t, _XLAC.OpSharding([[0, 1]], [], [], TILED))


def test_parts_are_reduced_over_devices():
    t = VALUES.to("xla")
    with pytest.raises(RuntimeError, match="takes a tensor that is split"):
        _XLAC._spmd_full_to_shard_shape(t)
    _XLAC._xla_mark_sharding(t, tiled())
    part = _XLAC._spmd_full_to_shard_shape(t)
    assert tuple(part.shape) == (2, 4) and _XLAC._get_xla_sharding_type(part) == MANUAL
    blocks = VALUES.reshape(4, 2, 2, 4).transpose(1, 2).reshape(8, 2, 4)  # by device
    total = _XLAC._xla_spmd_all_reduce("sum", part * 1, 0.5, [])
    whole = _XLAC._spmd_shard_to_full_shape(total, tiled(), (8, 8), torch.float32)
    assert _XLAC._get_xla_op_sharding(whole) == tiled()
    torch.testing.assert_close(whole.cpu()[:2, :4], blocks.sum(0) / 2)
    torch.testing.assert_close(whole.cpu()[6:, 4:], blocks.sum(0) / 2)
    part = _XLAC._spmd_full_to_shard_shape(t)
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
    halves = _XLAC._xla_spmd_reduce_scatter("max", part, 1.0, 1, 2, pairs)
    whole = _XLAC._spmd_shard_to_full_shape(halves, tiled(), (8, 4), torch.float32)
    torch.testing.assert_close(whole.cpu(), torch.maximum(VALUES[:, :4], VALUES[:, 4:]))
    with pytest.raises(ValueError, match="exactly one group"):
        _XLAC._xla_spmd_all_reduce("sum", part, 1.0, [[0, 1]])
    with pytest.raises(ValueError, match="is not one of"):
        _XLAC._xla_spmd_all_reduce("average", part, 1.0, [])
    with pytest.raises(ValueError, match="shard_count=4"):
        _XLAC._xla_spmd_reduce_scatter("sum", part, 1.0, 1, 4, pairs)
    for dimension in (2, -3):  # as for a tensor on the CPU
        with pytest.raises(IndexError, match=r"Dimension out of range.*\[-2, 1\]"):
            _XLAC._xla_spmd_reduce_scatter("sum", part, 1.0, dimension, 2, pairs)
    with pytest.raises(RuntimeError, match="takes parts of shape"):
        _XLAC._spmd_shard_to_full_shape(part, tiled(), (16, 8), torch.float32)


def test_marking_by_hand():
    t = VALUES.to("xla")
    manual = _XLAC.OpSharding([], [], [], MANUAL)
    _XLAC._xla_mark_sharding(t, tiled())
    for tensor in (t, t + 1):
        with pytest.raises(RuntimeError, match="any data tensors as manual is not supported"):
            _XLAC._mark_manual_sharding(tensor, manual)
    part = _XLAC._spmd_full_to_shard_shape(t) * 2
    with pytest.raises(RuntimeError, match="type MANUAL"):
        _XLAC._mark_manual_sharding(part, tiled())
    _XLAC._mark_manual_sharding(part, manual)
    assert _XLAC._get_xla_sharding_type(part) == MANUAL
    with pytest.raises(RuntimeError, match="must be cleared first"):
        _XLAC._mark_manual_sharding(part, manual)
    whole = _XLAC._spmd_shard_to_full_shape(part, tiled(), (8, 8), torch.float32)
    assert torch.equal(whole.cpu(), VALUES * 2)


def test_tensors_are_made_of_shards():
    rows = _XLAC.OpSharding([[i] for i in range(8)], [], [], TILED)
    shards = [VALUES[i : i + 1] for i in range(8)]
    made = _XLAC._global_tensor_from_cpu_shards(shards, rows)
    assert torch.equal(made.cpu(), VALUES) and _XLAC._get_xla_op_sharding(made) == rows
    # 7 rows do not divide: the last shard is padding, or has none of it
    uneven = _XLAC._global_tensor_from_cpu_shards([*shards[:7], VALUES[:0]], rows, (7, 8))
    assert torch.equal(uneven.cpu(), VALUES[:7])
    whole = _XLAC.OpSharding([], [], [], REPLICATED)
    same = _XLAC._global_tensor_from_cpu_shards([VALUES] * 8, whole)
    assert torch.equal(same.cpu(), VALUES)
    with pytest.raises(ValueError, match="3 shards for 8 devices"):
        _XLAC._global_tensor_from_cpu_shards(shards[:3], rows)
    with pytest.raises(ValueError, match="shard 1 has shape"):
        _XLAC._global_tensor_from_cpu_shards([shards[0], VALUES, *shards[2:]], rows)
    names = [f"CPU:{i}" for i in range(8)]
    _XLAC._load_local_shards(made, [2 * s for s in reversed(shards)], names[::-1])
    assert torch.equal(made.cpu(), 2 * VALUES)
    with pytest.raises(ValueError, match="this process has"):
        _XLAC._load_local_shards(made, shards[:1], names[:1])


def test_uploads_of_shards_take_the_callers_memory_as_it_is(monkeypatch):
    from xla_spmd.tensors import marking

    rows = _XLAC.OpSharding([[i] for i in range(8)], [], [], TILED)
    shards = [VALUES[i : i + 1].clone() for i in range(8)]
    client = marking.mesh_backend(torch.ones(1).to("xla")._s.trace).client
    seen, put = [], type(client).put

    def watched(self, array, placement):
        seen.append(array)
        return put(self, array, placement)

    monkeypatch.setattr(type(client), "put", watched)
    made = _XLAC._global_tensor_from_cpu_shards(shards, rows)
    assert [a.ctypes.data for a in seen] == [s.data_ptr() for s in shards]
    assert torch.equal(made.cpu(), VALUES)


def test_tensors_from_the_cpu_are_split_on_their_way():
    spec = _XLAC.XlaShardingSpec(VALUES, GRID, [], [], TILED)
    a, b = _XLAC._xla_tensors_from_aten([VALUES, VALUES], ["xla:0", "xla:0"], [spec, None])
    assert _XLAC._get_xla_op_sharding(a) == tiled() and _XLAC._get_xla_sharding_spec(b) == ""
    assert torch.equal(a.cpu(), VALUES) and torch.equal(b.cpu(), VALUES)
    batch = _XLAC.XlaShardingSpec(VALUES, [[i] for i in range(8)], [], [], TILED, True)
    (c,) = _XLAC._xla_tensors_from_aten([VALUES], ["xla:0"], [batch])
    assert tuple(c.shape) == (8, 8) and torch.equal(c.cpu(), VALUES)


def test_no_step_decides_unless_it_is_asked_to():
    assert _XLAC._xla_get_auto_sharding() is False
    _XLAC._xla_force_spmd_device()  # it is already
    assert torch_xla.devices() == [torch.device("xla:0")]


def test_a_checkpoint_is_asked_for_by_sigterm():
    with pytest.raises(RuntimeError, match="_activate_preemption_sync_manager"):
        _XLAC._sync_point_reached(1)
    former = signal.getsignal(signal.SIGTERM)
    _XLAC._activate_preemption_sync_manager()
    try:
        assert _XLAC._sync_point_reached(1) is False
        os.kill(os.getpid(), signal.SIGTERM)
        assert _XLAC._sync_point_reached(2) is True
    finally:
        _XLAC._deactivate_preemption_sync_manager()
    assert signal.getsignal(signal.SIGTERM) == former
