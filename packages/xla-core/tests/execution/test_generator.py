"""``torch.Generator(device="xla")`` and ``generator=`` of random operators."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import torch
from torch import nn

import torch_xla
from xla_core.torch_bridge import generator_device
from xla_core.torch_features.dtensor_random import ShardedNumbers

DRAWS = {
    "randn": lambda g: torch.randn(4, generator=g, device="xla"),
    "rand": lambda g: torch.rand(4, generator=g, device="xla"),
    "randint": lambda g: torch.randint(1000, (4,), generator=g, device="xla"),
    "randint from": lambda g: torch.randint(5, 1000, (4,), generator=g, device="xla"),
    "randperm": lambda g: torch.randperm(30, generator=g, device="xla"),
    "normal": lambda g: torch.normal(0.0, 1.0, (4,), generator=g, device="xla"),
    "normal_": lambda g: torch.empty(4, device="xla").normal_(generator=g),
    "uniform_": lambda g: torch.empty(4, device="xla").uniform_(generator=g),
    "random_": lambda g: torch.empty(4, device="xla").random_(generator=g),
    "exponential_": lambda g: torch.empty(4, device="xla").exponential_(generator=g),
    "bernoulli": lambda g: torch.bernoulli(torch.full((40,), 0.5, device="xla"), generator=g),
    "bernoulli_": lambda g: torch.empty(40, device="xla").bernoulli_(0.5, generator=g),
    "multinomial": lambda g: torch.multinomial(torch.ones(40, device="xla"), 9, generator=g),
    "poisson": lambda g: torch.poisson(torch.full((40,), 9.0, device="xla"), g),
    "init": lambda g: nn.init.trunc_normal_(torch.empty(4, device="xla"), generator=g),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_repeats_what_is_drawn(name, compile_count):
    draw = DRAWS[name]
    g = torch.Generator(device="xla").manual_seed(7)
    first, second = draw(g).cpu(), draw(g).cpu()
    assert not torch.equal(first, second)
    compiled = compile_count()
    g.manual_seed(7)
    assert torch.equal(draw(g).cpu(), first)
    state = g.get_state()
    assert torch.equal(draw(g).cpu(), second)
    g.set_state(state)
    assert torch.equal(draw(g).cpu(), second)
    assert not torch.equal(draw(g.manual_seed(8)).cpu(), first)
    assert compile_count() == compiled  # a seed is an argument of the program


def test_it_is_independent_of_the_global_one():
    torch_xla.manual_seed(1)
    expected = [torch.rand(3, device="xla").cpu() for _ in range(2)]
    torch_xla.manual_seed(1)
    host = torch.get_rng_state()
    g = torch.Generator(device="xla").manual_seed(3)
    alone = torch.rand(3, generator=g, device="xla").cpu()
    got = [torch.rand(3, device="xla").cpu()]
    torch.rand(3, generator=g, device="xla")
    got.append(torch.rand(3, device="xla").cpu())
    assert torch.equal(torch.stack(got), torch.stack(expected))
    assert torch.equal(torch.get_rng_state(), host)
    torch.manual_seed(5)
    g.manual_seed(3)
    assert torch.equal(torch.rand(3, generator=g, device="xla").cpu(), alone)


def test_it_has_the_methods_of_generators():
    host, g = torch.Generator(), torch.Generator("xla")
    assert isinstance(g, torch.Generator)
    assert g.device == torch.device("xla", 0)
    assert g.initial_seed() == host.initial_seed()
    for seed in (0, -1, 2**64 - 1):
        assert g.manual_seed(seed) is g
        assert g.initial_seed() == host.manual_seed(seed).initial_seed()
    assert g.seed() == g.initial_seed()
    assert torch.Generator(device="xla:0").seed() != g.initial_seed()
    for wrong in (2**65, "text"):
        with pytest.raises((ValueError, RuntimeError)) as expected:
            host.manual_seed(wrong)
        with pytest.raises(expected.type, match=str(expected.value)[:20]):
            g.manual_seed(wrong)
    assert g.set_state(g.get_state()) is g
    with pytest.raises(TypeError, match="ByteTensor"):
        g.set_state(torch.zeros(3))


@pytest.mark.parametrize(
    "again", [lambda g: pickle.loads(pickle.dumps(g)), copy.deepcopy, lambda g: g.clone_state()]
)
def test_copies_go_on_from_the_same_state(again):
    g = torch.Generator(device="xla").manual_seed(11)
    torch.rand(2, generator=g, device="xla")
    copied = again(g)
    assert copied.device == g.device
    assert copied.initial_seed() == 11
    expected = torch.rand(3, generator=g, device="xla").cpu()
    assert torch.equal(torch.rand(3, generator=copied, device="xla").cpu(), expected)


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_of_the_cpu_is_refused(name):
    with pytest.raises(RuntimeError, match="Expected a 'xla' device type for generator"):
        DRAWS[name](torch.Generator())


ON_CPU = {
    "randn": lambda g: torch.randn(4, generator=g),
    "rand": lambda g: torch.rand(4, generator=g),
    "randint": lambda g: torch.randint(1000, (4,), generator=g),
    "randperm": lambda g: torch.randperm(30, generator=g),
    "normal": lambda g: torch.normal(0.0, 1.0, (4,), generator=g),
    "normal_": lambda g: torch.empty(4).normal_(generator=g),
    "bernoulli_": lambda g: torch.empty(4).bernoulli_(0.5, generator=g),
    "multinomial": lambda g: torch.multinomial(torch.ones(4), 2, generator=g),
    "poisson": lambda g: torch.poisson(torch.ones(4), g),
    "init": lambda g: nn.init.trunc_normal_(torch.empty(4), generator=g),
    "sampler": lambda g: list(torch.utils.data.RandomSampler(range(4), generator=g)),
}


@pytest.mark.parametrize("name", ON_CPU)
def test_operators_of_the_cpu_refuse_it(name):
    g = torch.Generator(device="xla").manual_seed(3)
    state = g.get_state()
    with pytest.raises(RuntimeError, match=r"Expected a 'cpu' (device type for )?generator"):
        ON_CPU[name](g)
    assert torch.equal(g.get_state(), state)


def test_a_torch_that_keeps_the_device_elsewhere_is_refused(monkeypatch):
    monkeypatch.setattr(generator_device, "_OFFSETS", range(16, 40, 8))
    with pytest.raises(RuntimeError, match="keeps a generator's device at an unknown place"):
        torch.Generator(device="xla")


def test_generators_of_other_devices_are_pytorchs():
    g = torch.Generator()
    assert type(g) is type(torch.default_generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance(3, torch.Generator)
    assert torch.equal(pickle.loads(pickle.dumps(g)).get_state(), g.get_state())

    class Own(torch.Generator):
        pass

    assert isinstance(Own(), Own)
    assert isinstance(Own(), torch.Generator)
    assert not isinstance(g, Own)
    with pytest.raises(RuntimeError):
        torch.Generator(device="meta")


def test_fork_rng_keeps_the_devices_state():
    torch_xla.manual_seed(1)
    expected = torch.rand(3, device="xla").cpu()
    torch_xla.manual_seed(1)
    with torch.random.fork_rng(devices=[0], device_type="xla"):
        torch.manual_seed(9)
        torch.rand(5, device="xla")
    assert torch.equal(torch.rand(3, device="xla").cpu(), expected)


def test_dtensors_draw_from_generators_of_both_kinds():
    spec = types.SimpleNamespace(mesh=types.SimpleNamespace(device_type="xla"), placements=())
    numbers = ShardedNumbers()
    drawn = []
    for g in (torch.Generator(device="xla"), torch.Generator()):
        with numbers._distribute_region(spec, g.manual_seed(3)):
            drawn.append(torch.rand(3, device="xla").cpu())
    assert torch.equal(*drawn)
