"""A GPT trained under each strategy: losses, programs, what each device holds, and the collectives."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import torch_xla
import torch_xla.distributed.spmd as xs
from xla_core.extension_api.programs import all_programs
from xla_spmd.reports import program_report
from xla_spmd.tensors.sharded_tensor import local_shards

_spec = importlib.util.spec_from_file_location(
    "xla_spmd_tests_gpt", Path(__file__).parents[1] / "gpt.py"
)
gpt = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = gpt
_spec.loader.exec_module(gpt)

STEPS = 4


@pytest.fixture(scope="module")
def cpu_losses():
    return gpt.train_on_cpu(STEPS)


class Run:
    """One training run, and what was seen on the way."""

    def __init__(self, strategy):
        self.strategy = strategy
        self.model = gpt.build().to("xla")
        self.mesh = gpt.shard(self.model, strategy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.compiled = []
        before = len(all_programs())
        losses = []
        for ids in gpt.batches(STEPS):
            losses.append(self.step(ids.to("xla"), strategy))
            torch_xla.sync()
            self.compiled.append(len(all_programs()) - before)
            if len(losses) == 1:
                self.first = program_report.parameter_shares(self.model, self.optimizer)
        self.last = program_report.parameter_shares(self.model, self.optimizer)
        self.program = all_programs()[-1]
        self.losses = [loss.item() for loss in losses]

    def step(self, ids, strategy):
        xs.mark_sharding(ids, self.mesh, strategy.batch)
        self.optimizer.zero_grad()
        loss = gpt.loss_of(self.model, ids)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def check_one_program_after_warm_up(run):
    # the first step makes the optimizer's state, the second is the one that repeats
    assert run.compiled == [1, 2, 2, 2]


def check_each_device_holds_its_share(run):
    size = sum(p.numel() * p.element_size() for p in run.model.parameters())
    for shares in (run.first, run.last):
        for kind, copies in (("parameters", 1), ("gradients", 1), ("state", 2)):
            held = shares[kind]
            assert sorted(held) == list(range(8))
            assert max(held.values()) == min(held.values())
            assert max(held.values()) <= run.strategy.share * size * copies
        if run.strategy.share == 1 / 8:  # everything is split, nothing is left whole
            assert shares["parameters"][0] == size // 8


def check_gradients_and_state_lie_as_their_parameter(run):
    spec = torch_xla._XLAC._get_xla_sharding_spec
    for name, parameter in run.model.named_parameters():
        wanted = run.strategy.spec(name, parameter)
        if wanted is None:
            continue
        text = run.mesh.get_op_sharding(wanted).text
        state = run.optimizer.state[parameter]
        for tensor in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]):
            assert spec(tensor) == text, name


def check_parameters_are_donated_to_their_updates(run):
    # parameter, gradient and two moments each; the gradients of the step before are not read
    assert len(run.program.aliases) >= 3 * len(list(run.model.parameters()))
    assert run.program.copied_donations == 0


@pytest.mark.parametrize("name", list(gpt.STRATEGIES))
def test_a_gpt_is_trained_under(name, cpu_losses):
    """One test for each strategy, as training is what takes the time."""
    run = Run(gpt.STRATEGIES[name])
    # sums over devices are added in another order
    assert run.losses == pytest.approx(cpu_losses, rel=1e-5)
    check_one_program_after_warm_up(run)
    check_each_device_holds_its_share(run)
    check_gradients_and_state_lie_as_their_parameter(run)
    check_parameters_are_donated_to_their_updates(run)
    assert {one.kind for one in program_report.collectives(run.program)} == run.strategy.kinds


def test_momentum_made_in_the_first_step_is_split(mesh):
    layer = torch.nn.Linear(8, 16).to("xla")
    xs.mark_sharding(layer.weight, mesh, ("data", "model"))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(4, 8, device="xla")).sum().backward()
    optimizer.step()
    torch_xla.sync()
    text = mesh.get_op_sharding(("data", "model")).text
    spec = torch_xla._XLAC._get_xla_sharding_spec
    assert spec(optimizer.state[layer.weight]["momentum_buffer"]) == text
    assert spec(layer.weight.grad) == text


def test_a_gradient_on_its_own_is_split(mesh):
    """Gradient accumulation: the step that makes a gradient does not update the parameter."""
    weight = torch.randn(16, 8, device="xla", requires_grad=True)
    xs.mark_sharding(weight, mesh, ("data", None))
    (torch.ones(4, 16, device="xla") @ weight).sum().backward()
    torch_xla.sync()
    text = mesh.get_op_sharding(("data", None)).text
    assert torch_xla._XLAC._get_xla_sharding_spec(weight.grad) == text
    (torch.ones(4, 16, device="xla") @ weight).sum().backward()
    torch_xla.sync()
    assert torch_xla._XLAC._get_xla_sharding_spec(weight.grad) == text
    assert weight.grad.cpu().eq(8).all()


def test_loading_a_checkpoint_keeps_the_shardings(mesh):
    layer = torch.nn.Linear(8, 16).to("xla")
    xs.mark_sharding(layer.weight, mesh, ("data", "model"))
    text = mesh.get_op_sharding(("data", "model")).text
    other = torch.nn.Linear(8, 16)
    layer.load_state_dict(other.state_dict())
    torch.testing.assert_close((layer.weight * 1).cpu(), other.weight)
    shares = program_report.parameter_shares(layer)["parameters"]
    assert shares[0] == 16 * 8 * 4 // 8  # the bias was not used yet: no device has it
    assert torch_xla._XLAC._get_xla_sharding_spec(layer.weight) == text
    copied = {name: value.to("xla") for name, value in torch.nn.Linear(8, 16).state_dict().items()}
    layer.load_state_dict(copied)
    torch.testing.assert_close((layer.weight * 1).cpu(), copied["weight"].cpu())
    # weights that came from the host are whole nowhere; the bias is an argument of the step now
    held = {t.name: t.device_bytes for t in program_report.live_tensors(layer)}
    assert held["weight"] == dict.fromkeys(range(8), 16 * 8 * 4 // 8)
    assert held["bias"] == dict.fromkeys(range(8), 16 * 4)
    assert torch_xla._XLAC._get_xla_sharding_spec(layer.weight) == text


def test_a_split_tensor_takes_over_a_whole_one(mesh):
    weight = torch.zeros(16, 8, device="xla")
    xs.mark_sharding(weight, mesh, ("data", None))
    source = torch.arange(128.0).reshape(16, 8).to("xla") + 1
    torch_xla.sync()
    weight.copy_(source)
    torch_xla.sync()
    spec = torch_xla._XLAC._get_xla_sharding_spec
    assert spec(weight) == mesh.get_op_sharding(("data", None)).text
    assert spec(source) == "{replicated}"
    assert [tuple(shard.data.shape) for shard in local_shards(weight)] == [(4, 8)] * 8
    assert weight.cpu().equal(source.cpu())


def test_a_weight_is_gathered_once_for_both_directions(mesh):
    """The layer multiplies by the transposed weight, its gradient by the weight: one value."""
    weight = torch.randn(16, 8, device="xla")
    xs.mark_sharding(weight, mesh, ("data", None))
    x = torch.randn(256, 8, device="xla", requires_grad=True)
    xs.mark_sharding(x, mesh, ("data", None))
    torch_xla.sync()
    torch.nn.functional.linear(torch.nn.functional.linear(x, weight).tanh(), weight.t()).backward(x)
    torch_xla.sync()
    found = program_report.collectives(all_programs()[-1])
    assert [(one.kind, one.bytes) for one in found] == [("all-gather", 16 * 8 * 4)]


@pytest.mark.parametrize("turned", [False, True])
def test_a_layer_stays_whole_and_keeps_the_batch_apart(mesh, turned):
    """Its product has all dimensions of the input, which the partitioner may have split one by one."""
    host = [torch.randn(8, 6, 4), torch.randn(16, 4), torch.randn(16)]
    on_device = [t.to("xla").requires_grad_() for t in host]
    x, weight = on_device[:2]
    xs.mark_sharding(x, mesh, ("data", "model", None))
    xs.mark_sharding(weight, mesh, ("data", None))
    torch_xla.sync()

    def layer(x, weight, bias):
        # a layer whose weight is a transpose
        weight = weight.t().contiguous().t() if turned else weight
        return torch.nn.functional.linear(x, weight, bias)

    result = layer(*on_device)
    assert type(result.grad_fn).__name__ == "LinearBackward0"
    result.square().sum().backward()
    torch_xla.sync()
    expected = [t.requires_grad_() for t in host]
    layer(*expected).square().sum().backward()
    for got, wanted in zip(on_device, expected, strict=True):
        torch.testing.assert_close(got.grad.cpu(), wanted.grad)


PRODUCTS = {
    "turned left": lambda a, b, c: a.t() @ b,
    "turned twice": lambda a, b, c: a.t() @ b.t().t(),
    "both turned": lambda a, b, c: (b.t() @ a) + (c.t() @ c.transpose(0, 1)),
    "added": lambda a, b, c: torch.addmm(c, a.t(), b.transpose(0, -1).t(), beta=0.5, alpha=2.0),
    "read by others too": lambda a, b, c: (a.t() @ b) + a.t().sum() + c.t(),
    "no turn": lambda a, b, c: a.transpose(0, 0).t() @ b,
    "of a vector": lambda a, b, c: a.t() @ b[:, 0],
    "of another dtype": lambda a, b, c: a.t().double().float() @ b,
}


@pytest.mark.parametrize("function", PRODUCTS.values(), ids=PRODUCTS)
def test_products_of_transposes(function):
    host = [torch.randn(5, 4), torch.randn(5, 4), torch.randn(4, 4)]
    on_device = [t.to("xla").requires_grad_() for t in host]
    host = [t.requires_grad_() for t in host]
    expected, result = function(*host), function(*on_device)
    expected.square().sum().backward()
    result.square().sum().backward()
    torch.testing.assert_close(result.cpu(), expected)
    for t, other in zip(host, on_device, strict=True):
        assert (t.grad is None) == (other.grad is None)
        if t.grad is not None:
            torch.testing.assert_close(other.grad.cpu(), t.grad)
