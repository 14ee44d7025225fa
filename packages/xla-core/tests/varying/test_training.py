"""Training on batches of random lengths: few programs, and the losses of the CPU."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_xla
from xla_core.varying import families

STEPS, LONGEST, WORDS, WIDTH, HEADS, CLASSES = 10, 48, 31, 16, 2, 3


class Block(nn.Module):
    """A transformer's block; ``mask`` None is causal, ``"table"`` looks the causal mask up."""

    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        causal = torch.ones(LONGEST, LONGEST).tril().view(1, 1, LONGEST, LONGEST)
        self.register_buffer("causal", causal)

    def forward(self, x, mask):
        batch, length, _ = x.shape
        parts = self.mixed(self.before(x)).split(WIDTH, dim=2)
        q, k, v = (p.view(batch, length, HEADS, -1).transpose(1, 2) for p in parts)
        if mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif isinstance(mask, str):
            scores = q @ k.transpose(-2, -1) * k.size(-1) ** -0.5
            hidden = self.causal[:, :, :length, :length] == 0
            y = F.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).contiguous().view(batch, length, WIDTH))
        return x + self.wide(self.between(x))


class Model(nn.Module):
    """A language model (``kind`` gpt or table) or a classifier (bert)."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.block, self.norm = Block(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES if kind == "bert" else WORDS)

    def forward(self, words, present):
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        masks = {"gpt": None, "table": "table", "bert": (present > 0)[:, None, None]}
        x = self.norm(self.block(x, masks[self.kind]))
        if self.kind != "bert":
            return self.head(x[:, :-1]).flatten(0, 1), words[:, 1:].flatten()
        pooled = (x * present[..., None]).sum(1) / present.sum(1, keepdim=True)
        return self.head(pooled), words[:, 0] % CLASSES


def losses(kind, device, batches):
    torch.manual_seed(0)
    model = Model(kind).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    found = []
    for words, present in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(*model(words.to(device), present.to(device)))
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        found.append(loss.detach())
    return [loss.item() for loss in found]


def batch(length, size):
    words = torch.randint(0, WORDS, (size, length))
    ends = torch.randint(1, length + 1, (size, 1))
    return words, (torch.arange(length)[None] < ends).float()


@pytest.mark.parametrize("kind", ["gpt", "table", "bert"])
def test_random_lengths_take_few_programs(kind, varying, counted, compile_count):
    torch.manual_seed(2)
    draw = random.Random(0)
    lengths = [draw.randint(8, LONGEST) for _ in range(STEPS)]
    batches = [batch(length, 4) for length in lengths]
    wanted = losses(kind, "cpu", batches)
    seen = set(lengths[:3])
    first = losses(kind, "xla", batches[:3])
    before = compile_count()
    programs = counted(families.PROGRAMS)
    found = losses(kind, "xla", batches)
    assert first == pytest.approx(wanted[:3], abs=1e-4)
    assert found == pytest.approx(wanted, abs=1e-4)
    assert len(set(lengths) - seen) > 5
    assert compile_count() - before <= 6, families.kept_out()
    assert 0 < counted(families.PROGRAMS) - programs <= 6


def test_the_last_batch_may_be_smaller_and_of_another_length(run_lengths):
    torch.manual_seed(3)
    table, out = torch.randn(WORDS, WIDTH), torch.randn(WIDTH, WORDS)

    def step(words, table, out):
        rows = F.embedding(words, table).tanh()
        scores = (rows + rows.mean(1, keepdim=True)) @ out
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), words[:, 1:].flatten())

    sizes = [(8, 20), (6, 33), (8, 41), (3, 29), (5, 40), (8, 38), (4, 22)]

    def make(size):
        return torch.randint(0, WORDS, size), table, out

    # two lengths and their product need four batches to be told apart
    assert run_lengths(step, make, sizes) >= 3, families.kept_out()


def test_a_convolutional_net_takes_batches_of_any_size(run_lengths):
    torch.manual_seed(4)
    kernel, scale, out = torch.randn(4, 3, 3, 3), torch.rand(4), torch.randn(5, 16)

    def step(images, kernel, scale, out):
        kernel = kernel.detach().requires_grad_()
        x = F.conv2d(images, kernel, padding=1)
        x = F.max_pool2d(F.batch_norm(x, None, None, scale, training=True).relu(), 2)
        classes = torch.arange(images.shape[0], device=images.device) % 5
        loss = F.cross_entropy(F.linear(x.flatten(1), out), classes)
        loss.backward()
        return loss.detach(), kernel.grad

    def make(size):
        return torch.randn(size, 3, 4, 4), kernel, scale, out

    near = {"rtol": 1e-3, "atol": 1e-3}
    assert run_lengths(step, make, (8, 5, 7, 3, 6), near) == 3, families.kept_out()
