"""Attention and grouped products by name: values and gradients are those of plain PyTorch on the CPU.

The kernels for TPUs run here interpreted, as plain operations: that checks what is put around them. Only
that of ``ragged_paged_attention`` does not: jax 0.10.2 can interpret it in neither of its two ways.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torch_xla.experimental import custom_kernel as ck
from torch_xla.experimental.splash_attention import SplashAttentionConfig, splash_attention
from xla_core.execution import runtime
from xla_core.jax_bridge import pallas_kernels
from xla_core.kernels import flash_attention, grouped_matmul, paged_attention
from xla_core.kernels import splash_attention as splash
from xla_core.operators.target import Target, lowering_for
from xla_core.testing import programs

# sums of a hundred products of normal numbers, added in another order
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
HIDDEN = float("-inf")


def on_device(*tensors):
    return [None if t is None else t.to("xla") for t in tensors]


@pytest.fixture
def interpreted(monkeypatch):
    """Run a rule for a TPU, its kernels interpreted on this machine's CPU."""
    monkeypatch.setattr(pallas_kernels, "for_tpu", lambda kind, cores: pallas_kernels.interpreted)
    return run_for_tpu


def run_for_tpu(rule, *operands):
    arrays = [t.numpy() if isinstance(t, torch.Tensor) else t for t in operands]
    places = [i for i, a in enumerate(arrays) if isinstance(a, np.ndarray)]

    def function(*given):
        filled = dict(zip(places, given, strict=True))
        return rule(*(filled.get(i, a) for i, a in enumerate(arrays)))

    # by our own client: one of jax's would look for TPUs, and leave its marks on the environment
    with lowering_for(Target("tpu", "TPU v5 lite")):
        results = programs.run(runtime.client(), function, *(arrays[i] for i in places))
    tensors = [torch.from_numpy(r) for r in results]
    return tensors[0] if len(tensors) == 1 else tensors


def attention(q, k, v, ab=None, ids=None, causal=False, scale=1.0, cap=None, window=None):
    scores = q @ k.transpose(-1, -2)
    scores = (scores + ab if ab is not None else scores) * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    row, column = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    if causal:
        scores = scores.masked_fill(column > row, HIDDEN)
    if window is not None:
        scores = scores.masked_fill((column - row).abs() > window, HIDDEN)
    if ids is not None:
        scores = scores.masked_fill(ids[:, None, :, None] != ids[:, None, None, :], HIDDEN)
    return scores.softmax(-1) @ v


def check_gradients(function, reference, tensors):
    """The same values and gradients from ``function`` on the device as from ``reference``."""
    here = [t.clone().requires_grad_() for t in tensors]
    there = [t.to("xla").requires_grad_() for t in tensors]
    expected, found = reference(*here), function(*there)
    torch.testing.assert_close(found.detach().cpu(), expected.detach(), **CLOSE)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (found * weights.to("xla")).sum().backward()
    for mine, wanted in zip(there, here, strict=True):
        torch.testing.assert_close(mine.grad.cpu(), wanted.grad, **CLOSE)


SEGMENTS = torch.tensor([[0] * 3 + [1] * 3 + [2] * 2, [0] * 8])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ids", [None, SEGMENTS], ids=["whole", "segments"])
@pytest.mark.parametrize("biased", [False, True])
def test_flash_attention_is_attention(causal, ids, biased):
    torch.manual_seed(0)
    tensors = [torch.randn(2, 3, 8, 4) for _ in range(3)]
    tensors += [torch.randn(1, 3, 8, 8)] if biased else []
    segments = ids.to("xla") if ids is not None else None

    def ours(q, k, v, ab=None):
        return ck.flash_attention(q, k, v, causal, segments, segments, 0.5, ab=ab)

    def wanted(q, k, v, ab=None):
        return attention(q, k, v, ab, ids, causal, 0.5)

    check_gradients(ours, wanted, tensors)


def test_rows_that_see_nothing_take_no_part_in_gradients():
    """Their values are the mean of what they do not see, as in jax's kernels."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 4, 8).to("xla").requires_grad_() for _ in range(3))
    ids = [torch.tensor([[0, 0, 9, 9]]).to("xla"), torch.zeros(1, 4).int().to("xla")]
    found = ck.flash_attention(q, k, v, False, *ids)
    found[:, :, 2:].sum().backward()
    torch.testing.assert_close(
        found[:, :, 2:].detach().cpu(), v.detach().cpu().mean(2, True).expand(1, 2, 2, 8)
    )
    assert all(t.grad.cpu().count_nonzero() == 0 for t in (q, k, v))


def test_flash_attention_of_more_dimensions_and_by_its_operator():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 3, 8, 4) for _ in range(3))
    found = ck.flash_attention(*on_device(q, k, v), causal=True)
    torch.testing.assert_close(found.cpu(), attention(q, k, v, causal=True), **CLOSE)
    named = torch.ops.xla.flash_attention(*on_device(q[0], k[0], v[0]), casual=True)
    torch.testing.assert_close(named.cpu(), found[0].cpu(), **CLOSE)


def test_flash_attention_refuses_half_of_the_segments():
    q = torch.zeros(2, 1, 4, 4, device="xla")
    ids = torch.zeros(2, 4, dtype=torch.int32, device="xla")
    with pytest.raises(ValueError, match="or neither"):
        ck.flash_attention(q, q, q, q_segment_ids=ids)
    with pytest.raises(ValueError, match=r"kv_segment_ids has the shape \(4,\)"):
        ck.flash_attention(q, q, q, q_segment_ids=ids, kv_segment_ids=ids[0])


@pytest.mark.parametrize("biased", [False, True])
def test_flash_kernels_pad_to_whole_blocks(biased, interpreted):
    """130 positions are two blocks of 128: what is padded neither counts nor gets gradients."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 2, n, 32) for n in (130, 140, 140, 130))
    ab = torch.randn(2, 2, 130, 140) if biased else None
    numbers = (not biased, 0.3, list(flash_attention.FlashAttention.DEFAULT_BLOCK_SIZES.values()))
    operands = (q, k, v, ab, None, None)
    o, logs = interpreted(flash_attention.forward, *operands, *numbers)
    leaves = [t.requires_grad_() for t in (q, k, v, ab) if t is not None]
    wanted = attention(q, k, v, ab, causal=not biased, scale=0.3)
    torch.testing.assert_close(o, wanted.detach(), **CLOSE)
    wanted.backward(grad)
    operands = [None if t is None else t.detach() for t in operands]
    found = interpreted(flash_attention.backward, grad, *operands, o, logs, *numbers, biased)
    for mine, leaf in zip(found, leaves, strict=False):
        torch.testing.assert_close(mine, leaf.grad, rtol=1e-4, atol=1e-4)  # two more products


def pages(batch, per_sequence, total):
    return torch.randperm(total)[: batch * per_sequence].reshape(batch, per_sequence).int()


def keys_of(cache, indices, length):
    """The first keys of a sequence: (key heads, length, size)."""
    return cache[:, indices.long()].flatten(1, 2)[:, :length]


def one_by_one(q, k_pages, v_pages, lengths, indices, q_lengths, cap):
    """(batch, queries, heads, size): each query of each sequence on its own."""
    groups = q.shape[2] // k_pages.shape[0]
    result = torch.zeros_like(q)
    for b, length in enumerate(lengths.tolist()):
        keys, values = (keys_of(c, indices[b], length) for c in (k_pages, v_pages))
        for i in range(q.shape[1]):
            seen = min(length, i + 1 + length - int(q_lengths[b]))
            for head in range(q.shape[2]):
                scores = keys[head // groups, :seen] @ q[b, i, head]
                if cap is not None:
                    scores = torch.tanh(scores / cap) * cap
                result[b, i, head] = scores.softmax(0) @ values[head // groups, :seen]
    return result


def cache(heads=2, total=16, page=4, size=8):
    return torch.randn(heads, total, page, size), torch.randn(heads, total, page, size)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_paged_attention(cap):
    torch.manual_seed(0)
    q, (k, v), lengths = torch.randn(3, 4, 8), cache(), torch.tensor([1, 7, 16]).int()
    indices = pages(3, 4, 16)
    found = ck.paged_attention(*on_device(q, k, v, lengths, indices), 2, attn_logits_soft_cap=cap)
    wanted = one_by_one(q[:, None], k, v, lengths, indices, [1, 1, 1], cap)[:, 0]
    torch.testing.assert_close(found.cpu(), wanted, **CLOSE)
    with pytest.raises(ValueError, match="megacore_mode is 'core'"):
        ck.paged_attention(*on_device(q, k, v, lengths, indices), 2, "core")


def test_paged_attention_in_the_kernel(interpreted):
    torch.manual_seed(0)
    q, lengths, indices = torch.randn(2, 4, 128), torch.tensor([5, 16]).int(), pages(2, 4, 16)
    k, v = (c.bfloat16().float() for c in cache(size=128))  # as the kernel rounds them
    found = interpreted(paged_attention.lower_paged, q, k, v, lengths, indices, 2)
    wanted = one_by_one(q[:, None], k, v, lengths, indices, [1, 1], None)[:, 0]
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_several_queries_on_pages(cap):
    torch.manual_seed(0)
    q, (k, v), lengths = torch.randn(3, 3, 4, 8), cache(), torch.tensor([3, 7, 16]).int()
    indices, q_lengths = pages(3, 4, 16), torch.tensor([3, 2, 3]).int()
    operands = on_device(q, k, v, lengths, indices, q_lengths)
    found = ck.multi_queries_paged_attention(*operands, 2, 2, attn_logits_soft_cap=cap)
    wanted = one_by_one(q, k, v, lengths, indices, q_lengths, cap)
    torch.testing.assert_close(found.cpu(), wanted, **CLOSE)


def ragged(size=8):
    """Three sequences of 1, 4 and 3 queries, in 12 rows; pages with keys and values in turn."""
    torch.manual_seed(0)
    q, cached = torch.randn(12, 4, size), torch.randn(16, 4, 4, size)
    lengths = torch.tensor([9, 4, 16, 0]).int()
    ends = torch.tensor([0, 1, 5, 8, 0]).int()
    return q, cached, lengths, pages(4, 4, 16), ends, torch.tensor([3]).int()


def ragged_reference(q, cached, lengths, indices, ends, count, scale, cap=None, window=None):
    result = torch.zeros_like(q)
    for s in range(int(count[0])):
        keys, values = (
            cached[indices[s].long(), :, part::2]
            .flatten(0, 1)[: int(lengths[s])]
            .repeat_interleave(2, 1)
            for part in (0, 1)
        )  # (keys, heads, size)
        start, end = int(ends[s]), int(ends[s + 1])
        for row in range(start, end):
            last = int(lengths[s]) - (end - row) + 1
            first = max(0, last - window) if window else 0
            scores = torch.einsum("hd,khd->hk", q[row], keys[first:last]) * scale
            scores = torch.tanh(scores / cap) * cap if cap else scores
            result[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), values[first:last])
    return result


@pytest.mark.parametrize(("cap", "window"), [(None, None), (2.0, None), (None, 3)])
def test_ragged_paged_attention(cap, window):
    operands = ragged()
    found = ck.ragged_paged_attention(
        *on_device(*operands), sm_scale=0.4, soft_cap=cap, sliding_window=window
    )
    wanted = ragged_reference(*operands, 0.4, cap, window)
    torch.testing.assert_close(found.cpu(), wanted, **CLOSE)
    exact = ck.ragged_paged_attention(
        *on_device(*operands), sm_scale=0.4, soft_cap=cap, sliding_window=window, use_kernel=False
    )
    torch.testing.assert_close(exact.cpu(), wanted[:8], **CLOSE)


def test_ragged_paged_attention_with_scaled_keys_and_values():
    operands = ragged()
    scaled = ck.ragged_paged_attention(*on_device(*operands), k_scale=0.5, v_scale=3.0)
    parts = torch.tensor([0.5, 3.0]).repeat(2)[:, None]
    wanted = ragged_reference(operands[0], operands[1] * parts, *operands[2:], 1.0)
    torch.testing.assert_close(scaled.cpu(), wanted, **CLOSE)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({5: torch.tensor([5]).int()}, "5 sequences, with pages for 4"),
        ({2: torch.tensor([9, 4, 17, 0]).int()}, "17 keys, but its pages have room for 16"),
        ({4: torch.tensor([0, 1, 5, 13, 0]).int()}, "13 queries, but q has 12 rows"),
        ({2: torch.tensor([9, 3, 16, 0]).int()}, "sequence 1 has more queries than keys"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(change, problem):
    operands = [change.get(i, t) for i, t in enumerate(ragged())]
    with pytest.raises(ValueError, match=problem):
        ck.ragged_paged_attention(*on_device(*operands), use_kernel=False)


def test_the_number_of_sequences_may_have_no_dimension():
    q, pages = torch.randn(4, 2, 8), torch.randn(1, 4, 4, 8)
    integers = [torch.tensor(n, dtype=torch.int32) for n in ([4], [[0]], [0, 4], 1)]
    operands = on_device(q, pages, *integers)
    result = ck.ragged_paged_attention(*operands, use_kernel=False)
    torch.testing.assert_close(result.cpu(), ck.ragged_paged_attention(*operands).cpu())


@pytest.mark.parametrize("name", ["flash", "splash", "grouped", "GMM"])
def test_second_gradients_are_refused_instead_of_zeros(name):
    q = torch.randn(1, 1, 4, 8, device="xla", requires_grad=True)
    rows, matrices = torch.randn(4, 3, device="xla"), torch.randn(2, 3, 5, device="xla")
    matrices.requires_grad_()
    sizes = torch.tensor([1, 3], device="xla")
    first, function = {
        "flash": (q, lambda: ck.flash_attention(q, q, q)),
        "splash": (q, lambda: splash_attention(q, q, q, SplashAttentionConfig())),
        "grouped": (matrices, lambda: ck.gmm(rows, matrices, sizes)),
        "GMM": (matrices, lambda: ck.GMM.apply(rows, matrices, sizes, (8, 8, 8))),
    }[name]
    (gradient,) = torch.autograd.grad(function().square().sum(), first, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        gradient.square().sum().backward()


def test_heads_that_do_not_divide_are_refused():
    q, *rest = ragged()
    with pytest.raises(ValueError, match="3 heads of queries cannot share 2 heads of keys"):
        ck.ragged_paged_attention(*on_device(q[:, :3], *rest))


GROUPS = torch.tensor([3, 0, 5, 2]).int()


def grouped_product(lhs, rhs, sizes=GROUPS):
    rows, start = [], 0
    for size, matrix in zip(sizes.tolist(), rhs, strict=True):
        rows.append(lhs[start : start + size] @ matrix)
        start += size
    return torch.cat([*rows, torch.zeros(len(lhs) - start, rhs.shape[2])])


@pytest.mark.parametrize("function", [ck.gmm, ck.GMM.apply], ids=["gmm", "GMM"])
def test_grouped_products(function):
    torch.manual_seed(0)
    sizes = GROUPS.to("xla")
    operands = [torch.randn(12, 5), torch.randn(4, 5, 6)]
    check_gradients(lambda lhs, rhs: function(lhs, rhs, sizes), grouped_product, operands)


def test_grouped_products_with_transposed_matrices():
    torch.manual_seed(0)
    sizes = GROUPS.to("xla")
    check_gradients(
        lambda lhs, rhs: ck.gmm(lhs, rhs, sizes, transpose_rhs=True),
        lambda lhs, rhs: grouped_product(lhs, rhs.transpose(1, 2)),
        [torch.randn(12, 5), torch.randn(4, 6, 5)],
    )


def test_grouped_products_of_some_groups():
    """Two of four matrices are here; rows of the other groups are zeros."""
    torch.manual_seed(0)
    lhs, rhs = torch.randn(12, 5), torch.randn(4, 5, 6)
    whole = grouped_product(lhs, rhs)
    whole[:3], whole[8:] = 0, 0
    offset = torch.tensor(1).int().to("xla")
    found = ck.gmm(*on_device(lhs, rhs[1:3], GROUPS), group_offset=offset)
    torch.testing.assert_close(found.cpu(), whole, **CLOSE)
    right = torch.randn(12, 6)
    some = ck.tgmm(*on_device(lhs.t(), right, GROUPS), group_offset=offset, num_actual_groups=2)
    torch.testing.assert_close(some.cpu(), by_group(lhs, right)[1:3], **CLOSE)


def by_group(lhs, right, sizes=GROUPS):
    ends = sizes.cumsum(0).tolist()
    return torch.stack(
        [lhs[e - s : e].t() @ right[e - s : e] for e, s in zip(ends, sizes.tolist(), strict=True)]
    )


def test_grouped_products_in_the_kernels(interpreted):
    """300 rows of which 290 belong to groups, in tiles of 128."""
    torch.manual_seed(0)
    lhs, rhs, right = torch.randn(300, 128), torch.randn(3, 128, 256), torch.randn(300, 256)
    sizes = torch.tensor([130, 0, 160]).int()
    found = interpreted(grouped_matmul.lower_gmm, lhs, rhs, sizes)
    torch.testing.assert_close(found, grouped_product(lhs, rhs, sizes), rtol=1e-4, atol=1e-4)
    found = interpreted(
        grouped_matmul.lower_tgmm, lhs.t().contiguous(), right, sizes, (128, 128, 128)
    )
    torch.testing.assert_close(found, by_group(lhs, right, sizes), rtol=1e-4, atol=1e-4)


def test_ranks_are_checked():
    with pytest.raises(ValueError, match="rhs of gmm has 2 dimensions; it needs 3"):
        ck.gmm(*on_device(torch.ones(2, 2), torch.ones(2, 2), torch.ones(2).int()))


@pytest.mark.parametrize("activations", [False, True])
def test_products_with_eight_bit_weights(activations):
    torch.manual_seed(0)
    x, w = torch.randn(5, 16), torch.randint(-128, 128, (7, 16), dtype=torch.int8)
    x[2] = 0
    scale = torch.rand(7) / 100
    found = ck.quantized_matmul_int8(*on_device(x, w, scale), quantize_activation=activations)
    if activations:
        own = x.abs().amax(1, keepdim=True) / 127
        x = torch.where(own == 0, 0, (x / own).round()) * own
    torch.testing.assert_close(found.cpu(), (x @ w.float().t()) * scale, **CLOSE)
    with pytest.raises(NotImplementedError, match="zero_point is not supported"):
        ck.quantized_matmul_int8(*on_device(x, w, scale), zero_point=scale.to("xla"))


@pytest.mark.parametrize(
    ("causal", "cap", "window", "segments"),
    [(True, None, None, True), (False, 2.0, None, False), (True, None, 2, False)],
)
def test_splash_attention(causal, cap, window, segments):
    torch.manual_seed(0)
    config = SplashAttentionConfig(
        attentiontype_local_sliding=window is not None, slide_window_size=window
    )
    assert SplashAttentionConfig.from_json(config.to_json()) == config
    ids = SEGMENTS if segments else None
    device_ids = ids.to("xla") if segments else None

    def ours(q, k, v):
        return splash_attention(q, k, v, config.to_json(), device_ids, causal, cap)

    def wanted(q, k, v):
        return attention(q, k, v, ids=ids, causal=causal, cap=cap, window=window)

    check_gradients(ours, wanted, [torch.randn(2, 3, 8, 4) for _ in range(3)])


def test_splash_kernels_pad_to_whole_blocks(interpreted):
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 2, 200, 128) / 4 for _ in range(4))
    ids = torch.arange(200).div(70, rounding_mode="floor").expand(2, 200).contiguous()
    config = SplashAttentionConfig().to_json()
    found = interpreted(splash.forward, q, k, v, ids, config, True, None)
    wanted = attention(*(t.requires_grad_() for t in (q, k, v)), ids=ids, causal=True)
    torch.testing.assert_close(found, wanted.detach(), **CLOSE)
    wanted.backward(grad)
    operands = [t.detach() for t in (q, k, v)]
    gradients = interpreted(splash.backward, grad, *operands, ids, config, True, None)
    for mine, leaf in zip(gradients, (q, k, v), strict=True):
        torch.testing.assert_close(mine, leaf.grad, rtol=1e-4, atol=1e-4)  # two more products


def test_a_sliding_window_needs_a_size():
    q = torch.zeros(1, 1, 4, 4, device="xla")
    with pytest.raises(ValueError, match="needs slide_window_size"):
        splash_attention(q, q, q, SplashAttentionConfig(attentiontype_local_sliding=True))


@pytest.mark.parametrize("function", ["flash", "splash", "gmm", "operator"])
def test_kernels_in_compiled_graphs(function):
    """The operators are nodes of torch.compile's graphs, forward and backward."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    sizes, matrices = GROUPS.to("xla"), [torch.randn(12, 5), torch.randn(4, 5, 6)]
    config = SplashAttentionConfig().to_json()
    functions = {
        "flash": (
            lambda q, k, v: ck.flash_attention(q, k, v, causal=True),
            lambda q, k, v: attention(q, k, v, causal=True),
            [torch.randn(2, 3, 8, 4) for _ in range(3)],
        ),
        "splash": (
            lambda q, k, v: splash_attention(q, k, v, config),
            lambda q, k, v: attention(q, k, v, causal=True),
            [torch.randn(2, 3, 8, 4) for _ in range(3)],
        ),
        "gmm": (lambda lhs, rhs: ck.gmm(lhs, rhs, sizes), grouped_product, matrices),
        "operator": (
            lambda lhs, rhs: torch.ops.xla.gmm(lhs, rhs, sizes),
            grouped_product,
            matrices,
        ),
    }
    ours, wanted, tensors = functions[function]
    compiled = torch.compile(ours, backend="openxla", fullgraph=True)
    for _ in range(2):
        check_gradients(compiled, wanted, tensors)


def test_importing_the_names_imports_no_kernel(run_interpreter):
    """Libraries import them on any machine, before they know what the device is."""
    found = run_interpreter(
        """
        import sys
        import torch_xla.experimental.custom_kernel
        import torch_xla.experimental.splash_attention
        print([n for n in sys.modules if "pallas" in n and n.startswith("jax")])
        from xla_core.execution import runtime
        print(runtime.started())
        """
    )
    assert found.split() == ["[]", "False"]
