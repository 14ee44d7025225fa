"""Captured steps over a mesh: bit-equal to ordinary ones, split as they are split."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import torch_xla
import torch_xla.distributed.spmd as xs
from torch_xla.experimental.capture import CaptureError, capture
from xla_core.support import counters

_spec = importlib.util.spec_from_file_location(
    "xla_spmd_tests_capture_gpt", Path(__file__).parents[1] / "gpt.py"
)
gpt = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = gpt
_spec.loader.exec_module(gpt)

STEPS = 9
"""Of the last three, the first lends the parameters (``Lending``), and the others take them from it."""


def trained(strategy, captured, every=1):
    """Losses, the model and its parameters' shardings after some steps, each for ``every`` batches."""
    model = gpt.build().to("xla")
    mesh = gpt.shard(model, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def backward(ids):
        loss = gpt.loss_of(model, ids)
        loss.backward()
        return loss

    def update():
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    def step(ids):
        optimizer.zero_grad()
        loss = backward(ids)
        optimizer.step()
        schedule.step()
        return loss

    called = step if every == 1 else backward
    if captured:
        called, update = capture(called), capture(update)
    losses = []
    for number, ids in enumerate(gpt.batches(STEPS * every), 1):
        ids = ids.to("xla")
        xs.mark_sharding(ids, mesh, strategy.batch)
        losses.append(called(ids).detach())
        if every > 1 and number % every == 0:
            update()
        torch_xla.sync()
    shardings = {n: torch_xla._XLAC._get_xla_sharding_spec(p) for n, p in model.named_parameters()}
    values = {n: p.cpu() for n, p in model.named_parameters()}
    return [loss.item() for loss in losses], values, shardings


@pytest.mark.parametrize("name", list(gpt.STRATEGIES)[:2])
def test_training(name):
    strategy = gpt.STRATEGIES[name]
    before = counters.all_counters().get("CapturedStepReplayed", 0)
    losses, values, shardings = trained(strategy, True)
    assert counters.all_counters()["CapturedStepReplayed"] == before + STEPS - 3
    expected, others, wanted = trained(strategy, False)
    assert losses == expected
    assert shardings == wanted
    assert all(torch.equal(values[name], others[name]) for name in others)


def test_gradients_of_several_batches():
    strategy = gpt.STRATEGIES[list(gpt.STRATEGIES)[1]]
    before = counters.all_counters().get("CapturedStepReplayed", 0)
    losses, values, _ = trained(strategy, True, every=2)
    # all but the first three with and without gradients, and the first three updates
    assert counters.all_counters()["CapturedStepReplayed"] - before == 3 * STEPS - 8
    expected, others, _ = trained(strategy, False, every=2)
    assert losses == expected
    assert all(torch.equal(values[name], others[name]) for name in others)


def test_arguments_that_lie_otherwise_are_refused_or_recorded():
    mesh = xs.Mesh(np.arange(8), (8,), ("x",))
    net = nn.Linear(4, 4).to("xla")
    step = capture(lambda x: net(x).sum(1))

    def value(split):
        x = torch.arange(32.0).reshape(8, 4).to("xla")
        if split:
            xs.mark_sharding(x, mesh, ("x", None))
        return x

    expected = net(value(False)).sum(1).tolist()
    for _ in range(4):
        assert step(value(True)).tolist() == pytest.approx(expected)
    for _ in range(4):
        assert step(value(False)).tolist() == pytest.approx(expected)
    assert step.recordings == 2


def test_a_parameter_that_is_split_otherwise_between_two_replays():
    mesh = xs.Mesh(np.arange(8), (8,), ("x",))

    def trained(captured):
        torch.manual_seed(0)
        net = nn.Linear(16, 8).to("xla")
        xs.mark_sharding(net.weight, mesh, ("x", None))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def train(x):
            optimizer.zero_grad()
            loss = net(x).pow(2).sum()
            loss.backward()
            optimizer.step()
            return loss

        step = capture(train) if captured else train
        losses = []
        for number in range(12):
            if number == 9:
                xs.clear_sharding(net.weight)
                xs.mark_sharding(net.weight, mesh, (None, "x"))
                if captured:
                    with pytest.raises(RuntimeError, match="the program expects"):
                        step(torch.ones(4, 16).to("xla"))
                    step.reset()
            losses.append(step(torch.ones(4, 16).to("xla")).item())
        return losses, net.weight.cpu()

    (losses, weight), (expected, wanted) = trained(True), trained(False)
    assert losses == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(weight, wanted)


def test_a_value_that_is_read_is_refused():
    step = capture(lambda x: x * x.sum().item())
    with pytest.raises(CaptureError, match="reads a value"):
        for _ in range(3):
            step(torch.ones(3))
