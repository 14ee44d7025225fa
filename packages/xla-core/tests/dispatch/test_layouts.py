"""Compressed sparse, nested and MKL-DNN tensors are refused at the line that asks for one, before anything runs."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from xla_core.dispatch.layouts import MSG_LAYOUT, LayoutError
from xla_core.testing.against_cpu import assert_same, copy_to, fallbacks


def dense():
    return torch.arange(12.0).reshape(3, 4).to("xla")


REFUSED = {
    "aten::_to_sparse_csr": lambda: dense().to_sparse_csr(),
    "aten::_to_sparse_bsr": lambda: dense().to_sparse_bsr((1, 1)),
    "aten::sparse_compressed_tensor": lambda: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2), device="xla"
    ),
    "aten::_sparse_mm_reduce_impl": lambda: torch.sparse.mm(
        torch.eye(3).to_sparse_csr(), dense(), "sum"
    ),
    "aten::sparse_sampled_addmm": lambda: torch.sparse.sampled_addmm(
        torch.eye(3).to_sparse_csr(), dense(), dense().t()
    ),
    "aten::_sparse_addmm": lambda: torch.sparse.mm(torch.eye(3).to_sparse(), dense()),
    "aten::sspaddmm": lambda: torch.smm(dense(), dense()),
    "aten::hspmm": lambda: torch.hspmm(dense(), dense()),
    "aten::_sparse_softmax": lambda: torch.sparse.softmax(dense(), 0),
    "aten::sparse_mask": lambda: dense().sparse_mask(torch.eye(3, 4).to_sparse()),
    "aten::_spdiags": lambda: torch.sparse.spdiags(
        dense(), torch.tensor([0, 1, 2]).to("xla"), (4, 4)
    ),
    "aten::zeros_like": lambda: torch.zeros_like(dense(), layout=torch.sparse_coo),
    "aten::to_mkldnn": lambda: dense().to_mkldnn(),
    "aten::_nested_tensor_from_tensor_list": lambda: torch.nested.nested_tensor([dense()]),
    "aten::_nested_view_from_jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2)], layout=torch.jagged, device="xla"
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("operator", REFUSED)
def test_one_error_names_the_operator_and_what_to_do(operator):
    with fallbacks() as ran_on_cpu, pytest.raises(LayoutError) as caught:
        REFUSED[operator]()
    assert str(caught.value) == MSG_LAYOUT.format(operator=operator)
    assert not ran_on_cpu


def test_products_of_dense_tensors_need_no_sparse_one():
    """``sparse.mm`` and ``sparse.addmm`` take them on the CPU, too, and give dense results."""

    def run(device):
        a, b, c = (torch.arange(float(i), 9.0 + i).reshape(3, 3).to(device) for i in range(3))
        leaves = [t.requires_grad_() for t in (a, b, c)]
        result = torch.sparse.mm(a, b) + torch.sparse.addmm(c, a, b, beta=0.5, alpha=2.0)
        return result.detach(), *torch.autograd.grad((result * result).sum(), leaves)

    with fallbacks() as ran_on_cpu:
        assert_same(run("xla"), run("cpu"))
    assert not ran_on_cpu


def test_a_jagged_tensor_moves_to_the_device_and_computes_there():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's prototype notice, and padding runs on the CPU
        host = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
        moved = host.to("xla") * 2
        assert torch.equal(moved.to_padded_tensor(0.0).cpu(), (host * 2).to_padded_tensor(0.0))


def test_a_copy_of_a_part_keeps_its_storage():
    part = torch.arange(20.0)[5:15]
    for device in ("cpu", "xla"):
        copied = copy_to(part, device)
        assert copied.cpu().tolist() == part.tolist()
        assert copied.untyped_storage().nbytes() == part.untyped_storage().nbytes()


@pytest.mark.parametrize("length", [3, 5])
def test_an_encoder_asks_in_evaluation_whether_padding_is_at_the_end(length):
    """Its fast path with nested tensors is for CPU and CUDA; it asks before it looks at the device."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    moved = copy.deepcopy(encoder).to("xla")
    x = torch.randn(2, 5, 8)
    for padding in (torch.arange(5) >= length, torch.arange(5) < 5 - length):
        padding = padding.expand(2, 5)
        with fallbacks() as ran_on_cpu, torch.no_grad():
            result = moved(x.to("xla"), src_key_padding_mask=padding.to("xla")).cpu()
        assert not ran_on_cpu
        wanted = encoder(x, src_key_padding_mask=padding)
        torch.testing.assert_close(result[~padding], wanted[~padding])
        aligned = [
            torch._nested_tensor_from_mask_left_aligned(x.to(device), ~padding.to(device))
            for device in ("cpu", "xla")
        ]
        assert aligned == [not padding[0, 0]] * 2
    with pytest.raises(RuntimeError, match="to be of ScalarType Bool"):
        torch._nested_tensor_from_mask_left_aligned(x.to("xla"), torch.ones(2, 5, device="xla"))
