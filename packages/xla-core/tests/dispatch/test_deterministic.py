"""``torch.use_deterministic_algorithms(True)``: what PyTorch refuses on accelerators works, with the same bits.

The operators are those that its documentation names; gradients are compared with the CPU's, too.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

_DRAWN = torch.Generator()


def _random(*shape):
    return torch.randn(*shape, generator=_DRAWN)


def _ids(*values):
    return torch.tensor(values)


# Each takes ``x``, which puts a leaf on the device, and ``i``, which puts indices there.
CASES = {
    "index_add": lambda x, i: x(5, 3).index_add(0, i(_ids(0, 0, 2)), x(3, 3)),
    "index_copy": lambda x, i: x(5).index_copy(0, i(_ids(1, 3)), x(2)),
    "index_put": lambda x, i: x(5).clone().index_put_((i(_ids(1, 1, 2)),), x(3), accumulate=True),
    "put_": lambda x, i: x(5).clone().put_(i(_ids(1, 1)), x(2), accumulate=True),
    "put_ that overwrites": lambda x, i: x(5).clone().put_(i(_ids(1, 3)), x(2)),
    "scatter_add": lambda x, i: x(5).scatter_add(0, i(_ids(1, 1, 2)), x(3)),
    "scatter_reduce": lambda x, i: x(5).scatter_reduce(0, i(_ids(1, 1, 2)), x(3), "prod"),
    "gather": lambda x, i: x(5).gather(0, i(_ids(1, 1))),
    "index_select": lambda x, i: x(5, 2).index_select(0, i(_ids(1, 1))),
    "embedding": lambda x, i: F.embedding(i(_ids(0, 1, 1)), x(4, 3)),
    "embedding_bag": lambda x, i: F.embedding_bag(
        i(_ids(0, 1, 1)), x(4, 3), i(_ids(0, 2)), mode="max"
    ),
    "cumsum": lambda x, i: x(9).cumsum(0),
    "bincount": lambda x, i: torch.bincount(i(_ids(1, 1, 3)), x(3).detach()),
    "nll_loss": lambda x, i: F.nll_loss(x(4, 3).log_softmax(1), i(_ids(0, 1, 2, 1))),
    "ctc_loss": lambda x, i: F.ctc_loss(
        x(6, 1, 4).log_softmax(2), i(torch.tensor([[1, 2]])), (6,), (2,)
    ),
    "grid_sample": lambda x, i: F.grid_sample(
        x(1, 1, 4, 4), x(1, 3, 3, 2).tanh(), align_corners=False
    ),
    "avg_pool3d": lambda x, i: F.avg_pool3d(x(1, 1, 4, 4, 4), 2),
    "adaptive_avg_pool2d": lambda x, i: F.adaptive_avg_pool2d(x(1, 1, 5, 5), 3),
    "adaptive_max_pool2d": lambda x, i: F.adaptive_max_pool2d(x(1, 1, 5, 5), 3),
    "max_pool3d": lambda x, i: F.max_pool3d(x(1, 1, 4, 4, 4), 2),
    "max_unpool1d": lambda x, i: F.max_unpool1d(x(1, 1, 2), i(torch.tensor([[[0, 3]]])), 2),
    "reflection_pad2d": lambda x, i: F.pad(x(1, 1, 5, 5), (2, 2, 1, 1), mode="reflect"),
    "replication_pad2d": lambda x, i: F.pad(x(1, 1, 5, 5), (2, 2, 1, 1), mode="replicate"),
    "interpolate": lambda x, i: F.interpolate(x(1, 1, 5, 5), 8, mode="bilinear"),
    "interpolate cubic": lambda x, i: F.interpolate(x(1, 1, 5, 5), 8, mode="bicubic"),
}


def _results(function, device):
    """A result and the gradients of what it was made of."""
    leaves = []
    _DRAWN.manual_seed(1)

    def leaf(*shape):
        leaves.append(_random(*shape).to(device).requires_grad_())
        return leaves[-1]

    result = function(leaf, lambda ids: ids.to(device))
    if result.requires_grad:
        result.sin().sum().backward()
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [one.detach().cpu() for one in (result, *gradients)]


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", CASES)
def test_what_accelerators_refuse_works(name):
    expected = _results(CASES[name], "cpu")
    torch.use_deterministic_algorithms(True)
    try:
        found, again = (_results(CASES[name], "xla") for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(found) == len(expected)
    for value, second, wanted in zip(found, again, expected, strict=True):
        torch.testing.assert_close(value, wanted)
        assert torch.equal(value, second)


def test_many_additions_into_few_elements_give_the_same_bits(deterministic):
    """As many as would be added in any order by a device with atomic additions."""
    ids = torch.randint(0, 3, (50_000,), generator=_DRAWN.manual_seed(2)).to("xla")
    values = _random(50_000).to("xla")
    sums = [torch.zeros(3, device="xla").index_add(0, ids, values).cpu() for _ in range(5)]
    assert all(torch.equal(sums[0], one) for one in sums[1:])


_DTYPES = [
    torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def _unwritten(dtype, device):
    some = torch.zeros(2, dtype=dtype, device=device)
    return [
        torch.empty(3, dtype=dtype, device=device),
        torch.empty_like(some),
        torch.empty_strided((2, 2), (1, 2), dtype=dtype, device=device),
        torch.empty_permuted((2, 2), (1, 0), dtype=dtype, device=device),
        some.new_empty(2),
        torch.zeros(2, dtype=dtype, device=device).resize_(4),
        torch.empty(2, dtype=dtype, device=device).resize_(4),
    ]


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_memory_that_nobody_wrote_to_is_filled(deterministic, dtype):
    for found, wanted in zip(_unwritten(dtype, "xla"), _unwritten(dtype, "cpu"), strict=True):
        torch.testing.assert_close(found.cpu(), wanted, equal_nan=True, rtol=0, atol=0)
        assert found._version == wanted._version


def test_it_is_not_filled_otherwise(deterministic):
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        assert torch.empty(3, device="xla").tolist() == [0.0] * 3
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(False)
    assert torch.empty(3, device="xla").tolist() == [0.0] * 3


def test_fills_do_not_show_in_factories_of_values(deterministic):
    assert torch.ones(3, device="xla").tolist() == [1.0] * 3
    assert torch.zeros(3, device="xla").tolist() == [0.0] * 3
    assert torch.nn.Linear(2, 3, device="xla").weight.isnan().any().item() is False
