"""torch_xla.experimental.distributed_checkpoint's helpers for state dicts, beside torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict as torchs_flatten
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from torch_xla.experimental.distributed_checkpoint import _helpers, planners


def test_flat_as_torch_makes_it():
    one, two = torch.ones(2), torch.zeros(3)
    state = {"a": {"b": one, "c": 3}, "d": [two, {"e": 5}], "f": "text", "g": {"h": {"i": two}}}
    flat, paths = _helpers.flatten_state_dict(state)
    wanted, wanted_paths = torchs_flatten(state)
    assert flat.keys() == wanted.keys()
    assert all(flat[key] is wanted[key] or flat[key] == wanted[key] for key in flat)
    assert paths == wanted_paths
    rebuilt: dict = {}
    for key, path in paths.items():
        _helpers.set_element(rebuilt, path, flat[key])
    assert rebuilt == state


def test_keys_that_would_be_one():
    with pytest.raises(ValueError, match=r"are both 'a\.b'"):
        _helpers.flatten_state_dict({"a": {"b": 1}, "a.b": 2})


def test_parts_are_views():
    whole = torch.arange(12.0).reshape(3, 4)
    part = planners.narrow_tensor_by_index(whole, (1, 2), (2, 2))
    assert torch.equal(part, whole[1:3, 2:4])
    part.zero_()
    assert whole[1:, 2:].eq(0).all()


def test_what_several_processes_have_is_written_by_the_first():
    def item(name):
        return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)

    plans = [SavePlan([item("a"), item("b")]), SavePlan([item("b"), item("c")])]
    kept = planners.dedup_tensors(plans)
    assert [[i.index.fqn for i in plan.items] for plan in kept] == [["a", "b"], ["c"]]
