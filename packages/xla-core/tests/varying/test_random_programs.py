"""Random programs with one varying length give what PyTorch gives, whatever is in the padding."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from xla_core.varying import families

LENGTHS = (6, 9, 7, 5, 12)

# From a matrix of (length, 4) to another.
_SAME = (
    lambda x, d: x.sin() + d.choice((0.5, 2.0)),
    lambda x, d: x * x.mean(d.choice((0, 1)), keepdim=True),
    lambda x, d: x.softmax(d.choice((0, 1))),
    lambda x, d: x.flip(d.choice((0, 1))),
    lambda x, d: x.cumsum(d.choice((0, 1))) / 4,
    lambda x, d: torch.where(x > x.amax(0) / 2, x, -x),
    lambda x, d: F.layer_norm(x, (4,)),
    lambda x, d: F.layer_norm(x.t(), (x.shape[0],)).t(),
    lambda x, d: (x @ x.t()).tril(d.choice((-1, 0, 1))).softmax(1) @ x,
    lambda x, d: F.scaled_dot_product_attention(*[x[None]] * 3, is_causal=d.random() < 0.5)[0],
    lambda x, d: x.t().reshape(-1).reshape(4, -1).t() + x,
    lambda x, d: x.reshape(-1).roll(d.choice((1, -2))).reshape(-1, 4),
    lambda x, d: torch.cat([x[1:], x[:1]]) - x,
    lambda x, d: torch.cat([x, x])[: x.shape[0]] * 0.5,
    lambda x, d: F.pad(x[1:-1], (0, 0, 1, 1), value=0.25),
    lambda x, d: x.gather(0, (x.abs() * 2).long().clamp(max=4)),
    lambda x, d: x[(x[:, 0].abs() * 2).long().clamp(max=4)],
    lambda x, d: x.sort(0).values,
    lambda x, d: x + torch.arange(x.shape[0], device=x.device)[:, None] / x.shape[0],
    lambda x, d: x[None].expand(3, -1, -1).transpose(1, 2).reshape(12, -1).sum(0)[:, None] + x,
    lambda x, d: x.index_add(0, torch.tensor([0, 2], device=x.device), x[-2:]),
    lambda x, d: torch.stack([x, x.exp()], 1).flatten(0, 1)[x.shape[0] :] / 3,
    lambda x, d: x * F.one_hot(x.argmax(1), 4) + x.argmax(0),
    lambda x, d: torch.logsumexp(x, 0) - x,
)  # fmt: skip


def program(seed):
    """A function of a matrix, the same each time it is called."""

    def function(x):
        draw = random.Random(seed)
        values = [x]
        for _ in range(draw.randint(3, 6)):
            new = draw.choice(_SAME)(draw.choice(values), draw)
            values.append(new.clamp(-9, 9) + draw.choice(values))
        ending = draw.choice((lambda v: v, lambda v: v.sum(0), lambda v: v.flatten(), torch.var))
        return ending(values[-1])

    return function


@pytest.mark.parametrize("seed", range(12))
def test_a_random_program_is_served_exactly(seed, run_lengths):
    torch.manual_seed(seed)
    near = {"rtol": 1e-3, "atol": 1e-3}
    served = run_lengths(program(seed), lambda n: (torch.rand(n, 4) * 2 - 1,), LENGTHS, near)
    assert served == len(LENGTHS) - 2, families.kept_out()
