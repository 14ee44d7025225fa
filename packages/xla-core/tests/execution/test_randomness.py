"""Random numbers: seeded, different from call to call and step to step, never a reason to compile."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_xla
import torch_xla.core.xla_model as xm

DRAWS = {
    "randn": lambda: torch.randn(40, device="xla"),
    "rand": lambda: torch.rand(40, device="xla"),
    "randint": lambda: torch.randint(0, 10**6, (40,), device="xla"),
    "randperm": lambda: torch.randperm(40, device="xla"),
    "randn_like": lambda: torch.randn_like(torch.zeros(40, device="xla")),
    "normal_": lambda: torch.empty(40, device="xla").normal_(1, 2),
    "uniform_": lambda: torch.empty(40, device="xla").uniform_(-1, 1),
    "exponential_": lambda: torch.empty(40, device="xla").exponential_(),
    "bernoulli": lambda: torch.full((200,), 0.5, device="xla").bernoulli(),
    "bernoulli_": lambda: torch.empty(200, device="xla").bernoulli_(0.5),
    "dropout": lambda: F.dropout(torch.ones(200, device="xla"), 0.5),
    "dropout_": lambda: F.dropout(torch.ones(200, device="xla"), 0.5, inplace=True),
    "multinomial": lambda: torch.multinomial(torch.ones(40, device="xla"), 20),
    "random_": lambda: torch.empty(40, device="xla").random_(),
    "torch.normal": lambda: torch.normal(torch.zeros(40, device="xla"), 1.0),
    "rrelu": lambda: F.rrelu(-torch.ones(40, device="xla"), training=True),
    "kaiming": lambda: nn.init.kaiming_normal_(torch.empty(8, 5, device="xla")),
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(40, device="xla")),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_seeds_repeat_and_calls_differ(draw, compile_count):
    torch_xla.manual_seed(42)
    first, second = draw(), draw()  # in one step
    torch_xla.sync()
    third = draw()
    torch_xla.sync()
    values = [first.tolist(), second.tolist(), third.tolist()]
    assert values[0] != values[1] != values[2] != values[0]

    compiled = compile_count()
    torch_xla.manual_seed(42)
    first, second = draw(), draw()
    torch_xla.sync()
    third = draw()
    torch_xla.sync()
    assert values == [first.tolist(), second.tolist(), third.tolist()]
    torch_xla.manual_seed(43)
    first, second = draw(), draw()
    torch_xla.sync()
    assert values[0] != first.tolist() and values[1] != second.tolist()
    assert compile_count() == compiled


def test_the_state_can_be_read_and_set():
    xm.set_rng_state(1234)
    assert xm.get_rng_state() == 1234
    torch.rand(3, device="xla")
    state = xm.get_rng_state()
    assert state != 1234
    x = torch.rand(3, device="xla")
    xm.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="xla"), x)
    for seed in (0, 1, -1, 2**63, 2**64 - 1):
        xm.set_rng_state(seed)
        y = torch.rand(3, device="xla").tolist()
        xm.set_rng_state(seed)
        assert torch.rand(3, device="xla").tolist() == y


def test_the_step_does_not_matter_to_the_numbers():
    """Where the steps are cut changes no draw."""
    torch_xla.manual_seed(7)
    together = [torch.rand(4, device="xla") for _ in range(3)]
    together = [x.tolist() for x in together]
    torch_xla.manual_seed(7)
    apart = []
    for _ in range(3):
        apart.append(torch.rand(4, device="xla").tolist())
        torch_xla.sync()
    assert together == apart


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_scales_the_rest(p):
    n = 40_000
    x = torch.ones(n, device="xla", requires_grad=True)
    y = F.dropout(x, p)
    y.sum().backward()
    values = y.detach().cpu()
    dropped = (values == 0).double().mean().item()
    # five standard deviations of a binomial share
    assert abs(dropped - p) < 5 * (p * (1 - p) / n) ** 0.5
    torch.testing.assert_close(
        values[values != 0], torch.full((), 1 / (1 - p)).expand(int((values != 0).sum()))
    )
    assert torch.equal(x.grad.cpu(), values)  # the mask of forward, not a new one
    assert torch.equal(F.dropout(x, p, training=False), x)
    assert F.dropout(x, 0.0).sum().item() == n
    assert F.dropout(x, 1.0).sum().item() == 0


def test_distributions_have_their_moments():
    n = 40_000
    torch_xla.manual_seed(0)
    error = 5 / n**0.5  # five standard errors of a mean of unit variance
    normal = torch.randn(n, device="xla").cpu().double()
    assert abs(normal.mean()) < error and abs(normal.std() - 1) < error
    uniform = torch.rand(n, device="xla").cpu().double()
    assert uniform.min() >= 0 and uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < error and abs(uniform.var() - 1 / 12) < error
    integers = torch.randint(-3, 3, (n,), device="xla").cpu()
    assert torch.bincount(integers + 3).min() > n / 6 * 0.9
    exponential = torch.empty(n, device="xla").exponential_(2.0).cpu().double()
    assert exponential.min() >= 0 and abs(exponential.mean() - 0.5) < error
    weights = torch.tensor([1.0, 3.0], device="xla")
    drawn = torch.multinomial(weights, n, replacement=True).cpu().double()
    assert abs(drawn.mean() - 0.75) < error


def test_dropout_in_training_never_compiles_again(compile_count, fallbacks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 2)).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(16, 8).to("xla")
    losses = []
    for step in range(12):
        if step == 3:
            compiled = compile_count()
        optimizer.zero_grad()
        loss = model(data + 0.01 * torch.randn_like(data)).pow(2).mean()
        loss.backward()
        xm.optimizer_step(optimizer, barrier=True)
        losses.append(loss)
    assert len({x.item() for x in losses}) == 12
    assert compile_count() == compiled
    assert fallbacks() == {}


def test_binomial_and_dirichlet_samples_are_drawn_on_the_device(fallbacks):
    counts = torch.tensor([0.0, 5, 10, 1000], device="xla").repeat(2000, 1)
    chances = torch.tensor([0.5, 0.0, 1.0, 0.3], device="xla")
    drawn = torch.binomial(counts, chances.expand_as(counts)).cpu()
    assert (drawn[:, :3] == torch.tensor([0.0, 0, 10])).all()
    assert abs(drawn[:, 3].mean().item() - 300) < 5 * (210 / 2000) ** 0.5
    concentration = torch.tensor([1.0, 3.0], device="xla")
    shares = torch.distributions.Dirichlet(concentration.expand(2000, 2)).sample().cpu()
    torch.testing.assert_close(shares.sum(1), torch.ones(2000))
    assert abs(shares[:, 0].mean().item() - 0.25) < 5 * (0.0375 / 2000) ** 0.5
    assert not fallbacks()
    with pytest.raises(RuntimeError, match="Found dtype"):
        torch.binomial(counts, counts.double())
