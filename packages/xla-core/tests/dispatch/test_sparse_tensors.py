"""Sparse tensors (COO) on ``xla``: their indices and values are on the device, and all they give is the CPU's."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import nn

from xla_core.dispatch.layouts import LayoutError, SparseXLATensor, parts
from xla_core.recording.xla_tensor import XLATensor
from xla_core.testing.against_cpu import assert_same, fallbacks


def dense(device, dtype=torch.float32):
    return torch.tensor([[1, 0, 2], [0, 3, 0]], dtype=dtype).to(device)


def uncoalesced(device):
    indices, values = torch.tensor([[0, 1, 0], [1, 2, 1]]), torch.tensor([1.0, 3.0, 2.0])
    return torch.sparse_coo_tensor(indices, values, (2, 3), device=device, check_invariants=True)


def test_indices_and_values_are_on_the_device():
    sparse = dense("xla").to_sparse()
    assert isinstance(sparse, SparseXLATensor)
    assert (sparse.layout, sparse.device.type, sparse.is_sparse) == (torch.sparse_coo, "xla", True)
    assert [type(p) for p in (*parts(sparse), sparse.indices(), sparse.values())] == [XLATensor] * 4
    text = repr(sparse)
    assert "device='xla:0', size=(2, 3), nnz=3, layout=torch.sparse_coo" in text


ON_THE_DEVICE = {
    "to_sparse": lambda d: dense(d).to_sparse(),
    "to_sparse, hybrid": lambda d: torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to(d).to_sparse(1),
    "to_sparse, all zeros": lambda d: torch.zeros(2, 3).to(d).to_sparse(),
    "to_sparse, complex": lambda d: dense(d, torch.complex64).to_sparse(),
    "what is held": lambda d: (
        (s := dense(d).to_sparse()).indices(), s.values(), s._nnz(), s.is_coalesced(), s.sparse_dim(), s.dense_dim()
    ),
    "to_dense": lambda d: uncoalesced(d).to_dense(),
    "coalesce": lambda d: uncoalesced(d).coalesce(),
    "coalesce, hybrid": lambda d: torch.sparse_coo_tensor(
        torch.tensor([[2, 0, 2]]), torch.arange(6.0).reshape(3, 2), (3, 2), device=d, check_invariants=True
    ).coalesce(),
    "moved there": lambda d: dense("cpu").to_sparse().to(d),
    "another dtype": lambda d: dense(d).to_sparse().double(),
    "clone": lambda d: uncoalesced(d).clone(),
    "deepcopy": lambda d: copy.deepcopy(dense(d).to_sparse()),
    "t": lambda d: uncoalesced(d).t(),
    "sparse.mm": lambda d: torch.sparse.mm(uncoalesced(d), torch.arange(6.0).reshape(3, 2).to(d)),
    "mm": lambda d: torch.mm(uncoalesced(d), torch.arange(6.0).reshape(3, 2).to(d)),
    "mm looks at no other element": lambda d: torch.mm(uncoalesced(d), torch.full((3, 2), torch.inf).to(d)),
    "sparse.addmm": lambda d: torch.sparse.addmm(
        torch.ones(2, 2).to(d), uncoalesced(d), torch.arange(6.0).reshape(3, 2).to(d), beta=0.5, alpha=2.0
    ),
    "sparse_mask": lambda d: (dense(d) + 1).sparse_mask(dense(d).to_sparse()),
    "dense + sparse": lambda d: dense(d) + uncoalesced(d),
    "add_": lambda d: dense(d).add_(uncoalesced(d), alpha=-2),
}  # fmt: skip


@pytest.mark.parametrize("case", ON_THE_DEVICE)
def test_taking_apart_and_putting_together_need_no_cpu(case):
    with fallbacks() as ran_on_cpu:
        got = ON_THE_DEVICE[case]("xla")
    assert_same(got, ON_THE_DEVICE[case]("cpu"))
    assert not ran_on_cpu


ON_THE_CPU = {
    "sparse + sparse": lambda d: uncoalesced(d) + uncoalesced(d),
    "mul by a number": lambda d: uncoalesced(d) * 2,
    "mul by a dense one": lambda d: dense(d) * uncoalesced(d),
    "abs": lambda d: uncoalesced(d).coalesce().abs(),
    "sum": lambda d: uncoalesced(d).sum(),
    "sparse.sum": lambda d: torch.sparse.sum(uncoalesced(d), 0),
    "sparse.softmax": lambda d: torch.sparse.softmax(uncoalesced(d), 1),
    "index_select": lambda d: uncoalesced(d).index_select(0, torch.tensor([1]).to(d)),
    "to_sparse of a number": lambda d: torch.tensor(3.0).to(d).to_sparse(),
}


@pytest.mark.filterwarnings("ignore::xla_core.dispatch.cpu_fallback.FallbackWarning")
@pytest.mark.parametrize("case", ON_THE_CPU)
def test_other_operators_run_on_the_cpu_and_give_tensors_of_the_device(case):
    with fallbacks() as ran_on_cpu:
        got = ON_THE_CPU[case]("xla")
    assert_same(got, ON_THE_CPU[case]("cpu"))
    assert ran_on_cpu
    assert got.device.type == "xla"


@pytest.mark.filterwarnings("ignore::xla_core.dispatch.cpu_fallback.FallbackWarning")
@pytest.mark.parametrize("change", [lambda t: t.mul_(3), lambda t: t.zero_()])
def test_operators_in_place_change_the_tensor(change):
    def run(device):
        tensor = uncoalesced(device)
        assert change(tensor) is tensor
        return tensor

    assert_same(run("xla"), run("cpu"))


def test_gradients_pass_through():
    def run(device):
        x = dense(device).requires_grad_()
        y = torch.arange(6.0).reshape(3, 2).to(device).requires_grad_()
        torch.sparse.mm(x.to_sparse(), y).square().sum().backward()
        by_product = x.grad
        x.grad = None
        (x.to_sparse().to_dense() * 2).sum().backward()
        return by_product, y.grad, x.grad

    with fallbacks() as ran_on_cpu:
        assert_same(run("xla"), run("cpu"))
    assert not ran_on_cpu


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD])
def test_an_embedding_with_sparse_gradients_trains_on_the_device(optimizer):
    def run(device):
        embedding = nn.Embedding(5, 3, sparse=True)
        embedding.weight.data.copy_(torch.arange(15.0).reshape(5, 3))
        embedding = embedding.to(device)
        steps = optimizer(embedding.parameters(), lr=0.1)
        for _ in range(2):
            steps.zero_grad()
            embedding(torch.tensor([1, 1, 4]).to(device)).square().sum().backward()
            steps.step()
        return embedding.weight, embedding.weight.grad.coalesce()

    with fallbacks() as ran_on_cpu:
        assert_same(run("xla"), run("cpu"))
    assert not ran_on_cpu


def test_a_saved_tensor_comes_back_to_the_device():
    file = io.BytesIO()
    torch.save(uncoalesced("xla"), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.device.type == "xla"
    assert_same(loaded, uncoalesced("cpu"))


def test_a_sparse_tensor_of_the_cpu_is_no_operand():
    host = dense("cpu").to_sparse()
    with pytest.raises(RuntimeError, match="not an XLA tensor"):
        dense("xla") * host
    with pytest.raises(LayoutError):
        torch.sparse.mm(host, torch.ones(3, 2, device="xla"))


def test_what_the_cpu_refuses_is_refused():
    for device in ("cpu", "xla"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(RuntimeError, match="sparse_dim argument must be in"):
                dense(device).to_sparse(5)
            with pytest.raises(RuntimeError, match="dtype argument is not supported"):
                uncoalesced(device).to_dense(dtype=torch.float64)
