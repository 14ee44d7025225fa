"""Reading and writing by every kind of index, against the CPU."""

from __future__ import annotations

import pytest
import torch

INDICES = {
    "int": lambda i: 1,
    "negative": lambda i: -1,
    "slice": lambda i: slice(1, 3),
    "step": lambda i: slice(None, None, 2),
    "ellipsis": lambda i: (..., 0),
    "None": lambda i: (None, slice(None), None),
    "ints": lambda i: (1, 2),
    "tensor": lambda i: i([0, 2]),
    "tensor 2-d": lambda i: i([[0, 2], [1, 1]]),
    "two tensors": lambda i: (i([0, 2]), i([1, 3])),
    "tensor and slice": lambda i: (i([0, 2]), slice(1, 3)),
    "slice and tensor": lambda i: (slice(None), i([3, 0, 1])),
    "tensors apart": lambda i: (i([0, 2]), slice(None), i([1, 3])),
    "0-d tensor": lambda i: i(1),
    "list": lambda i: [0, 2],
    "negative tensor": lambda i: i([-1, -3]),
    "mask": lambda i: i([True, False, True]),
    "mask 2-d": lambda i: i([[True, False, False, True]] * 3),
    "mask and int": lambda i: (i([True, False, True]), 1),
    "bool": lambda i: True,
    "empty": lambda i: i([], dtype=torch.int64),
    "empty slice": lambda i: slice(2, 1),
}


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("where", ["xla", "cpu"], ids=lambda w: f"index on {w}")
def test_reading_by_index(name, where):
    host = torch.arange(60.0).view(3, 4, 5)
    index = INDICES[name](lambda *a, **k: torch.tensor(*a, device=where, **k))
    found = host.to("xla")[index]
    same(found, host[INDICES[name](torch.tensor)])


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("value", ["number", "tensor"])
def test_writing_by_index(name, value):
    host = torch.arange(60.0).view(3, 4, 5)
    x = host.to("xla")
    index = INDICES[name](torch.tensor)
    new = (
        -1.5
        if value == "number"
        else -torch.arange(1.0, host[index].numel() + 1).view(host[index].shape)
    )
    host[index] = new
    x[INDICES[name](lambda *a, **k: torch.tensor(*a, device="xla", **k))] = (
        new if value == "number" else new.to("xla")
    )
    same(x, host)


def same(found, expected):
    assert found.device.type == "xla"
    assert torch.equal(found.cpu(), expected)
