"""``xr.use_spmd(auto=True)``: scripts without any annotation train over eight devices, and compute the same."""

from __future__ import annotations

import json
import textwrap
from importlib import util

import pytest

# A training loop as anybody writes it: what differs is the device, and one line in front.
PROGRAM = """
    import json, sys
    import torch, torch_xla
    import torch_xla.runtime as xr
    import torch_xla.distributed.spmd as xs
    from torch import nn
    from torch_xla.debug import metrics
    from torch_xla.distributed.spmd import debugging

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            q, k, v = (f(self.norm(x)).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.down(nn.functional.gelu(self.up(x)))

    def decoder(width=128):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(256, width), Block(width), nn.Linear(width, 256))

    def train(device, model, steps=3, rows=16, rate=1e-3, evaluate=False, kind=torch.optim.AdamW):
        model = model.to(device)
        optimizer = kind(model.parameters(), lr=rate)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for step in range(steps):
            x, y = (torch.randint(0, 256, (rows, 32), generator=generator).to(device) for _ in range(2))
            if evaluate and step % 2 == 0:
                with torch.no_grad():
                    losses.append(model(x).square().mean().item())
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model, optimizer

    def answer(**values):
        print(json.dumps(values))
"""


def run(script, code, **options):
    done = script(textwrap.dedent(PROGRAM) + textwrap.dedent(code), **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_decoder_trains_as_on_the_cpu_with_what_was_chosen_for_it(script):
    answer, printed = run(
        script,
        """
        expected = train("cpu", decoder())[0]
        xr.use_spmd(auto=True)
        losses, model, optimizer = train("xla", decoder())
        chosen = debugging.automatic_sharding()
        from xla_core.extension_api.tensors import storage_of
        from xla_core.extension_api.runtime import trace_of
        backend = trace_of(None).backend
        weight = model[1].up.weight
        state = [backend.sharding_of(storage_of(v).buffer) for v in optimizer.state[weight].values() if v.dim()]
        answer(expected=expected, losses=losses, axes=chosen.axes, specs=dict(chosen.specs), report=str(chosen),
               weight=backend.sharding_of(storage_of(weight).buffer), state=state,
               decisions=metrics.counter_value("CompileWithAutoSharding"),
               programs=metrics.counter_value("UncachedCompile"))
        """,
    )
    assert answer["losses"] == pytest.approx(answer["expected"], rel=1e-5)
    axes = dict(answer["axes"])
    assert set(axes) <= {"data", "fsdp", "tensor"}
    assert answer["report"] in printed
    # the first step, in which AdamW makes its state, and all that follow
    assert answer["programs"] == 2 and answer["decisions"] == 1
    split = [axis for spec in answer["specs"].values() for axis in spec if axis]
    assert split and "1.up.weight" in answer["specs"]
    # state lies as its parameter does
    assert answer["state"] and set(answer["state"]) == {answer["weight"]}


def test_what_an_evaluation_decides_is_decided_anew_by_training(script):
    answer, _ = run(
        script,
        """
        expected = train("cpu", decoder(), evaluate=True)[0]
        xr.use_spmd(auto=True)
        losses = train("xla", decoder(), evaluate=True)[0]
        answer(expected=expected, losses=losses, decisions=metrics.counter_value("CompileWithAutoSharding"))
        """,
    )
    assert answer["losses"] == pytest.approx(answer["expected"], rel=1e-5)
    assert answer["decisions"] == 2


def test_convolutions_with_running_statistics_and_momentum(script):
    answer, _ = run(
        script,
        """
        def images(device, steps=4):
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.Flatten(),
                nn.Linear(64 * 6 * 6, 10)).to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            generator = torch.Generator().manual_seed(1)
            losses = []
            for _ in range(steps):
                x = torch.randn(16, 3, 16, 16, generator=generator).to(device)
                y = torch.randint(0, 10, (16,), generator=generator).to(device)
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses, model[1].running_var.cpu().tolist()

        expected, variance = images("cpu")
        xr.use_spmd(auto=True)
        losses, own = images("xla")
        answer(expected=expected, losses=losses, variance=variance, own=own,
               axes=debugging.automatic_sharding().axes)
        """,
    )
    assert answer["losses"] == pytest.approx(answer["expected"], rel=1e-4)
    assert answer["own"] == pytest.approx(answer["variance"], rel=1e-4)


def test_a_parameter_that_the_user_marked_stays_as_marked(script):
    answer, _ = run(
        script,
        """
        import numpy as np
        expected = train("cpu", decoder())[0]
        xr.use_spmd(auto=True)
        model = decoder().to("xla")
        mesh = xs.Mesh(np.arange(8), (8,), ("mine",))
        xs.mark_sharding(model[2].weight, mesh, ("mine", None))
        losses = train("xla", model)[0]
        answer(expected=expected, losses=losses, kept=xs.wrap_if_sharded(model[2].weight).sharding_spec,
               specs=dict(debugging.automatic_sharding().specs))
        """,
    )
    assert answer["losses"] == pytest.approx(answer["expected"], rel=1e-5)
    assert answer["kept"] == "{devices=[8,1]0,1,2,3,4,5,6,7}" and "2.weight" not in answer["specs"]


def test_what_cannot_be_split_says_what_to_change(script):
    answer, _ = run(
        script,
        """
        xr.use_spmd(auto=True)
        model = nn.Linear(7, 7)
        try:
            model.to("xla")(torch.ones(3, 7).to("xla")).cpu()
        except RuntimeError as error:
            answer(error=str(error))
        """,
    )
    assert "nothing to split over 8 devices" in answer["error"]
    assert "is 3" in answer["error"] and "mark_sharding" in answer["error"]


@pytest.mark.long
@pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_script_for_chips_that_are_not_here(script):
    answer, printed = run(
        script,
        """
        xr.use_spmd(auto=True)
        train("xla", decoder(), steps=2)
        answer(axes=debugging.automatic_sharding().axes, programs=metrics.counter_value("UncachedCompile"))
        """,
        PJRT_DEVICE="TPU", XLA_AOT_TOPOLOGY="v5e:2x2", XLA_AOT_READS="zeros",
    )  # fmt: skip
    assert "automatic sharding over 4 devices (TPU v5 lite)" in printed and "nominal" not in printed
    assert answer["axes"] and answer["programs"] == 2
