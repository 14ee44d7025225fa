"""``XLA_CHECK_INDICES`` over a mesh: tables and indices that are split are checked like whole ones."""

import pytest
import torch
import torch.nn.functional as F

import torch_xla
import torch_xla.distributed.spmd as xs
from torch_xla.experimental.scan import scan
from xla_core.testing.internals import checking_indices

SPLITS = [("x", None), (None, "x"), (None, None)]


@pytest.fixture(autouse=True)
def _checking(monkeypatch):
    monkeypatch.setenv("XLA_CHECK_INDICES", "1")
    with checking_indices():
        yield


def look_up(table, index):
    return F.embedding(index, table)


def scanned(table, index):
    return scan(lambda c, i: (c + F.embedding(i, table).sum(0), c), table[0] * 0, index[:, None])[0]


def written(table, index):
    return table.index_add(0, index, table[:8])


@pytest.mark.parametrize("call", [look_up, scanned, written])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_indices_out_of_range(call, split):
    mesh = xs.Mesh(range(8), (8,), ("x",))
    values = torch.arange(16 * 8.0).reshape(16, 8)
    table = xs.mark_sharding(values.to("xla"), mesh, split)
    for last, given in ((5, None), (16, 16), (-1, -1)):
        index = torch.tensor([0, 1, 2, 3, 15, 7, 8, last])
        indices = xs.mark_sharding(index.to("xla"), mesh, ("x",))
        if given is None:
            found = call(table, indices)
            torch_xla.sync()
            expected = values[index].sum(0) if call is scanned else call(values, index)
            torch.testing.assert_close(found.cpu(), expected)
            continue
        with pytest.raises(IndexError, match=f"given index {given} for dimension 0 of size 16"):
            call(table, indices)
            torch_xla.sync()


def test_class_targets_out_of_range():
    mesh = xs.Mesh(range(8), (8,), ("x",))
    scores = xs.mark_sharding(torch.randn(8, 4).to("xla"), mesh, ("x", None))
    good = torch.tensor([0, 1, 2, 3, -100, 2, 1, 0])
    F.cross_entropy(scores, xs.mark_sharding(good.to("xla"), mesh, ("x",)))
    torch_xla.sync()
    bad = good.clone()
    bad[7] = 4
    with pytest.raises(IndexError, match=r"Target 4 is out of bounds.*test_index_checks.py"):
        F.cross_entropy(scores, xs.mark_sharding(bad.to("xla"), mesh, ("x",)))
        torch_xla.sync()
