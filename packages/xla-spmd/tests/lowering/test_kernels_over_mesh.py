"""Kernels over a mesh: each device computes the batches and heads that it holds."""

from __future__ import annotations

import pytest
import torch

import torch_xla
import torch_xla.distributed.spmd as xs
from torch_xla.experimental.custom_kernel import flash_attention
from torch_xla.experimental.splash_attention import SplashAttentionConfig, splash_attention
from xla_core.extension_api.programs import all_programs

SPEC = ("data", "model", None, None)


def attention(q, k, v, ids, ab=0):
    hidden = ids[:, None, :, None] != ids[:, None, None, :]
    return (q @ k.transpose(-1, -2) + ab).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def check(mesh, function, reference, ab=None, *, in_two_steps=False):
    """Values and gradients of ``function(q, k, v, ids, ...)``, and that each device works on its part."""
    torch.manual_seed(0)
    here = [torch.randn(8, 4, 16, 8).requires_grad_() for _ in range(3)]
    ids = torch.arange(16).div(5, rounding_mode="floor").expand(8, 16).contiguous()
    there = [t.detach().to("xla").requires_grad_() for t in here]
    for t in there:
        xs.mark_sharding(t, mesh, SPEC)
    more = [] if ab is None else [ab]
    wanted = reference(*here, ids, *more)
    found = function(*there, ids.to("xla"), *(t.to("xla") for t in more))
    wanted.square().sum().backward()
    loss = found.square().sum()
    if in_two_steps:
        assert loss.item() > 0
    loss.backward()
    torch_xla.sync()
    hlo = all_programs()[-1].executable.optimized_hlo()
    # scores of two of eight batches and two of four heads
    assert "f32[2,2,16,16]" in hlo and "f32[8,4,16,16]" not in hlo
    for mine, other in zip(
        (found, *(t.grad for t in there)), (wanted, *(t.grad for t in here)), strict=True
    ):
        # sums of products in another order
        torch.testing.assert_close(mine.detach().cpu(), other.detach(), rtol=1e-4, atol=1e-5)


@pytest.fixture
def global_mesh():
    """The global mesh is what it was, afterwards."""
    before = xs.get_global_mesh()
    yield
    xs.set_global_mesh(before)


@pytest.mark.parametrize("everywhere", [False, True], ids=["mesh", "global mesh"])
def test_flash_attention_by_parts(mesh, everywhere, global_mesh):
    torch.manual_seed(0)
    if everywhere:
        xs.set_global_mesh(mesh)

    def ours(q, k, v, ids, ab):
        return flash_attention(
            q, k, v, q_segment_ids=ids, kv_segment_ids=ids, ab=ab,
            partition_spec=SPEC, mesh=None if everywhere else mesh,
        )  # fmt: skip

    check(mesh, ours, attention, torch.randn(1, 4, 16, 16), in_two_steps=everywhere)


def test_splash_attention_by_parts(mesh):
    config = SplashAttentionConfig(
        mesh=str(mesh), qkv_partition_spec=SPEC, segment_ids_partition_spec=("data", None)
    ).to_json()
    check(
        mesh,
        lambda q, k, v, ids: splash_attention(q, k, v, config, ids, causal=False),
        attention,
        in_two_steps=True,
    )


def test_further_dimensions_in_front(mesh):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 2, 6, 8) for _ in range(3))
    spec = (None, "data", "model", None, None)
    there = [t.to("xla").requires_grad_() for t in (q, k, v)]
    found = flash_attention(*there, partition_spec=spec, mesh=mesh)
    ids = torch.zeros(4, 6)
    wanted = torch.stack([attention(*t, ids) for t in zip(q, k, v, strict=True)])
    # sums of products in another order
    torch.testing.assert_close(found.detach().cpu(), wanted, rtol=1e-4, atol=1e-5)
    found.sum().backward()
    assert all(t.grad.shape == q.shape and t.grad.cpu().isfinite().all() for t in there)


def test_lengths_are_not_split(mesh):
    q = torch.zeros(8, 4, 16, 8, device="xla")
    with pytest.raises(ValueError, match="split by batch and heads"):
        flash_attention(q, q, q, partition_spec=("data", None, "model", None), mesh=mesh)
    config = SplashAttentionConfig(mesh=str(mesh), qkv_partition_spec=(None, None, "data", None))
    with pytest.raises(ValueError, match="split by batch and heads"):
        splash_attention(q, q, q, config)
