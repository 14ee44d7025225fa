"""Steps whose repeats are loops give what they give without: training, hidden states, unrolled recurrent cells."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_xla
from xla_core.execution import runtime
from xla_core.extension_api.programs import all_programs, module_text

WIDTH, LAYERS = 16, 6


class Block(nn.Module):
    """Attention and an MLP with dropout."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.p = p

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        scores = torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1)
        x = x + F.dropout(self.out(scores @ v), self.p, self.training)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@pytest.fixture
def lower(monkeypatch):
    """A function that chooses how repeats are lowered: "1" as loops, "0" one by one."""
    # what is compared does not depend on how well the programs are compiled
    monkeypatch.setenv("XLA_COMPILE_EFFORT", "fast")

    def choose(value):
        monkeypatch.setenv("XLA_LOOP_REPEATS", value)
        runtime.trace_of(None).forget()  # an equal step may have been compiled in another way

    return choose


@pytest.fixture(params=["0", "1"], ids=["one by one", "loops"])
def looped(request, lower):
    """Whether repeats become loops in this test."""
    lower(request.param)
    return request.param == "1"


def loops_of(program):
    return module_text(program.program.stablehlo).count("stablehlo.while")


def latest(after):
    """The largest program that was compiled after the first ``after``."""
    return max(all_programs()[after:], key=lambda p: p.operations)


def trained(model, device, x, steps=4, sync=lambda: None):
    """The losses of some steps and the parameters after them."""
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    x, losses = x.to(device), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        sync()
        losses.append(loss.detach())
    return [loss.item() for loss in losses], [p.detach().cpu() for p in model.parameters()]


def test_training_is_that_of_the_cpu(looped):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(0.0) for _ in range(LAYERS)), nn.Linear(WIDTH, 3))
    x = torch.randn(4, 8, WIDTH)
    expected, parameters = trained(model, "cpu", x)
    before = len(all_programs())
    losses, after = trained(model, "xla", x, sync=torch_xla.sync)
    # sums in another order
    assert losses == pytest.approx(expected, rel=1e-4)
    for found, parameter in zip(after, parameters, strict=True):
        torch.testing.assert_close(
            found, parameter, rtol=1e-2, atol=1e-3
        )  # AdamW divides small numbers
    # one of the forward pass and one of the backward pass; an optimizer's updates stay as they are
    assert loops_of(latest(before)) == (2 if looped else 0)
    assert len(all_programs()[-1].donated) >= 3 * len(parameters)


def test_random_numbers_are_the_same_in_a_loop(lower):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(0.3) for _ in range(LAYERS)), nn.Linear(WIDTH, 3))
    x, results, counts = torch.randn(4, 8, WIDTH), [], []
    for value in ("0", "1"):
        lower(value)
        torch_xla.manual_seed(5)
        before = len(all_programs())
        results.append(trained(model, "xla", x, steps=2, sync=torch_xla.sync)[0])
        counts.append(loops_of(latest(before)))
    assert counts[1] - counts[0] == 2
    # another mask would change losses by tenths
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_hidden_states_of_all_layers(looped):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(0.1) for _ in range(LAYERS))).eval()
    x = torch.randn(4, 8, WIDTH)

    @torch.no_grad()
    def states(model, x):
        every = [x + 1]
        for block in model:
            every.append(block(every[-1]))
        return every

    expected = states(model, x)
    before = len(all_programs())
    found = states(model.to("xla"), x.to("xla"))
    torch_xla.sync()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)
    assert loops_of(latest(before)) == (1 if looped else 0)


def test_unrolled_cells_share_their_weights(looped):
    torch.manual_seed(0)
    cell = nn.LSTMCell(WIDTH, WIDTH)
    x = torch.randn(10, 4, WIDTH)

    def gradients(cell, x):
        h, c = x[0] * 0.5, x[0] * 0.25
        outputs = []
        for step in x:
            h, c = cell(torch.tanh(step), (h, c))
            h = torch.sigmoid(h) * h
            outputs.append(h)
        (torch.stack(outputs).pow(2).sum() + c.sum()).backward()
        return [p.grad for p in cell.parameters()]

    expected = gradients(copy.deepcopy(cell), x)
    before = len(all_programs())
    found = gradients(copy.deepcopy(cell).to("xla"), x.to("xla"))
    torch_xla.sync()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)
    assert (loops_of(latest(before)) > 0) == looped


def test_a_layer_that_differs_is_outside(looped):
    torch.manual_seed(0)
    blocks = [Block(0.0) for _ in range(2 * LAYERS)]
    blocks[LAYERS] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    model = nn.Sequential(*blocks)
    x = torch.randn(4, 8, WIDTH)
    expected, _ = trained(model, "cpu", x, steps=2)
    before = len(all_programs())
    losses, _ = trained(model, "xla", x, steps=2, sync=torch_xla.sync)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert loops_of(latest(before)) == (4 if looped else 0)
