"""The further names of the kernel modules: repeated rows, shapes on meta, kernels of jax arrays."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torch_xla.experimental import custom_kernel, xla_quantized_matmul
from torch_xla.experimental.pallas_kernels import (
    multi_queries_paged_attention_kernel,
    quantized_matmul_kernel,
    ragged_paged_attention_v2,
)


@pytest.mark.parametrize("repeats", [[1, 0, 2], [2, 3, 4], [0, 0, 0], [1, 2, 0]])
@pytest.mark.parametrize("total", [0, 3, 5])
def test_repeated_rows(repeats, total):
    rows = torch.arange(6.0).reshape(3, 2)
    counts = torch.tensor(repeats)
    expected = torch.repeat_interleave(rows, counts, 0)[:total]
    filler = rows[-1:].expand(total - len(expected), 2)
    found = custom_kernel.repeat_with_fixed_output_size(rows.to("xla"), counts.to("xla"), total)
    assert torch.equal(found.cpu(), torch.cat([expected, filler]))


def test_a_number_for_each_row():
    with pytest.raises(ValueError, match="one number per row"):
        custom_kernel.repeat_with_fixed_output_size(torch.ones(3), torch.ones(2), 4)


def test_shapes_on_meta_and_no_kernel_on_the_cpu():
    q = torch.empty(1, 2, 8, 16, device="meta")
    assert custom_kernel.flash_attention_non_xla(q, q, q).shape == q.shape
    lhs, rhs = torch.empty(6, 4, device="meta"), torch.empty(2, 4, 5, device="meta")
    assert custom_kernel.gmm_non_xla(lhs, rhs, lhs).shape == (6, 5)
    with pytest.raises(ValueError, match=r"ragged_paged_attention: .* on cpu; move them"):
        custom_kernel.ragged_paged_attention_non_xla(torch.ones(2, 2, 4))
    assert custom_kernel.safe_empty_like(None) is None
    assert custom_kernel.safe_empty_like(q).shape == q.shape
    wanted = torch.ones(1, requires_grad=True)
    assert custom_kernel.generate_ctx_need_grad(wanted, 1, torch.ones(1)) == [True, False, False]


def test_products_with_8_bit_weights():
    x, w = torch.randn(4, 16), torch.randint(-100, 100, (8, 16), dtype=torch.int8)
    scale = torch.rand(8)
    expected = (x @ w.float().t()) * scale
    arrays = [jnp.asarray(t.numpy()) for t in (x, w, scale)]
    found = quantized_matmul_kernel.quantized_matmul_int8(*arrays)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-3)
    found = xla_quantized_matmul.quantized_matmul(*(t.to("xla") for t in (x, w, scale)))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-3)
    with pytest.raises(NotImplementedError, match="no zero point"):
        quantized_matmul_kernel.quantized_matmul_int8(*arrays, zero_point=arrays[2])


def test_attention_of_jax_arrays():
    torch.manual_seed(0)
    q, pages = torch.randn(3, 2, 4), torch.randn(2, 4, 2, 4)
    rows = (torch.tensor([3]), torch.tensor([[1, 0]]), torch.tensor([0, 3]), torch.tensor([1]))
    keys, values = pages[1, :3, 0], pages[1, :3, 1]
    scores = torch.einsum("qhd,kd->hqk", q, keys) * 0.5
    scores = scores.masked_fill(torch.ones(3, 3).tril().eq(0), -1e30)
    expected = torch.einsum("hqk,kd->qhd", scores.softmax(-1), values)
    arrays = [jnp.asarray(t.numpy()) for t in (q, pages, *rows)]
    for kernel in (
        ragged_paged_attention_v2.ragged_paged_attention,
        ragged_paged_attention_v2.ref_ragged_paged_attention,
    ):
        found = kernel(*arrays, sm_scale=0.5)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)
    given = (t.to("xla") for t in (q, pages, *rows))
    found = custom_kernel.ragged_paged_attention_xla(*given, 0.5)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    of_pages = pages[None, :, :, 0], pages[None, :, :, 1]
    given = (q[None] * 0.5, *of_pages, rows[0], rows[1], torch.tensor([3]))
    found = multi_queries_paged_attention_kernel.paged_attention(
        *(jnp.asarray(t.numpy()) for t in given)
    )
    np.testing.assert_allclose(found[0], expected.numpy(), rtol=1e-4, atol=1e-5)


def test_numbers_of_blocks():
    names = ragged_paged_attention_v2
    assert (names.cdiv(7, 2), names.cdiv(8, 2)) == (4, 4)
    assert [names.next_power_of_2(i) for i in (1, 2, 3, 9)] == [1, 2, 4, 16]
    assert [names.get_dtype_packing(d) for d in (jnp.int8, jnp.bfloat16, jnp.float32)] == [4, 2, 1]
    assert names.get_min_page_size(1024) == 64
    assert names.get_tpu_version() == -1
    assert names.get_device_name(4).endswith("-4")
