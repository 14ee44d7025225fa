"""``assume_pure``: recorded once, called ever after; and gradients through functions of jax."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_xla
from torch_xla.experimental.assume_pure import (
    PureModule,
    assume_pure,
    assume_pure_torch,
    j2t_autograd,
)
from torch_xla.experimental.scan import scan
from xla_core.testing.against_cpu import assert_same


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


def test_a_module_is_recorded_once_and_trains_as_it_does_elsewhere(compile_count):
    cpu = net()
    model = PureModule(copy.deepcopy(cpu).to("xla"))
    called = []
    model._module.register_forward_pre_hook(lambda *_: called.append(1))
    results = []
    for module, device in ((cpu, "cpu"), (model, "xla")):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        generator, counts, losses = torch.Generator().manual_seed(1), [], []
        for _ in range(5):
            x = torch.randn(6, 4, generator=generator).to(device)
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            optimizer.step()
            torch_xla.sync()
            losses.append(loss.detach().cpu())
            counts.append(compile_count())
        results.append([losses, *module.parameters()])
    assert_same(results[1], results[0], (1e-3, 1e-5))
    assert len(called) == 1
    assert counts[4] == counts[2]


def test_other_shapes_modes_and_values_are_recorded_anew():
    called = []

    @assume_pure
    def f(x, scale, *, shift=None):
        called.append(1)
        return {"y": x * scale if shift is None else x * scale + shift}, scale

    x = torch.ones(2, device="xla")
    for scale in (2, 2.0, True, 2, 2.0):
        got, same = f(x, scale)
        assert (got["y"].tolist(), same) == ([float(scale)] * 2, scale)
        assert type(same) is type(scale)
    assert len(called) == 3
    f(torch.ones(3, device="xla"), 2)
    f(x, 2, shift=x)
    assert len(called) == 5
    tracked = x.clone().requires_grad_()
    f(tracked, 2, shift=tracked)[0]["y"].sum().backward()
    assert tracked.grad.tolist() == [3.0, 3.0]
    assert len(called) == 6
    with torch.no_grad():
        assert not f(tracked, 2, shift=tracked)[0]["y"].requires_grad
    assert len(called) == 7


def test_the_modes_of_submodules_are_followed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).to("xla")
    pure, x = PureModule(model), torch.ones(8, 4, device="xla")
    pure(x)
    model[1].eval()
    assert torch.equal(pure(x).cpu(), model(x).cpu())


def test_captured_tensors_are_read_at_every_call_and_get_gradients():
    w = torch.ones(2, device="xla", requires_grad=True)
    f = assume_pure(lambda x: (x * w).sin())
    x = torch.tensor([0.5, 1.0])
    for value in (1.0, 2.0):
        w.grad = None
        with torch.no_grad():
            w.fill_(value)
        f(x.to("xla")).sum().backward()
        assert_same(w.grad, x * (x * value).cos())


def test_random_numbers_are_fixed_unless_a_seed_is_an_argument():
    x = torch.ones(64, device="xla", requires_grad=True)
    fixed = assume_pure(lambda x: F.dropout(x, 0.5))
    assert fixed(x).tolist() == fixed(x).tolist()
    seeded = assume_pure(lambda x: F.dropout(x, 0.5), add_rng_seed_argument=True)
    one, other = seeded(x, rng_seed=0), seeded(x, rng_seed=1)
    assert one.tolist() == seeded(x, rng_seed=0).tolist() != other.tolist()
    one.sum().backward()
    assert_same(x.grad, one)
    with pytest.raises(TypeError, match="give it rng_seed="):
        seeded(x)


def test_pure_functions_nest():
    inner = assume_pure(lambda x, w: torch.tanh(x @ w))
    outer = assume_pure(lambda xs, w: scan(lambda c, x: (inner(c, w), inner(x, w)), xs[0], xs))
    x, w = torch.randn(3, 2, 2), torch.randn(2, 2)
    given = [t.to("xla").requires_grad_() for t in (x, w)]
    carry, ys = outer(*given)
    (carry.sum() + ys.sum()).backward()
    host = [t.clone().requires_grad_() for t in (x, w)]
    expected = host[0][0]
    for _ in range(3):
        expected = torch.tanh(expected @ host[1])
    stacked = torch.tanh(host[0] @ host[1])
    (expected.sum() + stacked.sum()).backward()
    assert_same(
        [carry, ys, *(t.grad for t in given)],
        [expected, stacked, *(t.grad for t in host)],
    )


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: assume_pure(lambda a: a.add_(1))(x), RuntimeError, "writes in place"),
        (lambda x: assume_pure(lambda a: a * a.sum().item())(x), RuntimeError, "read a value"),
        (lambda x: assume_pure(torch.sin)(x.cpu()), TypeError, "sin got a tensor on cpu"),
        (lambda x: assume_pure(lambda a, b: a)(x, {1, 2}), TypeError, "a set, which is not"),
        (lambda x: PureModule(nn.BatchNorm1d(2).to("xla"))(x), RuntimeError, "BatchNorm1d.forward"),
        (lambda x: assume_pure_torch(torch.sin), RuntimeError, "is for inference"),
    ],
)
def test_what_is_not_pure_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.ones(3, 2, device="xla"))


def test_the_inference_form_calls_its_function_once_if_asked():
    called = []

    def f(x):
        called.append(1)
        return x.sin(), x

    x = torch.ones(2, device="xla")
    with torch.no_grad():
        for use_cache, times in ((True, 1), (False, 3)):
            called.clear()
            pure = assume_pure_torch(f, use_cache)
            results = [pure(x) for _ in range(3)]
            assert len(called) == times
            assert_same(results[2], (torch.ones(2).sin(), torch.ones(2)))


def test_gradients_go_through_functions_of_jax(compile_count):
    def f(x, scale, *, places):
        y = jnp.sin(x) * scale["s"]
        return {"y": y[places], "n": jnp.argmax(x)}

    pure = j2t_autograd(f)
    x, s = torch.randn(4), torch.tensor(2.5)
    counts = []
    for _ in range(3):
        given = [t.to("xla").requires_grad_() for t in (x, s)]
        places = torch.tensor([1, 2], device="xla")
        found = pure(given[0] * 2, {"s": given[1]}, places=places)
        (found["y"] * 3).sum().backward()
        torch_xla.sync()
        counts.append(compile_count())
    assert counts[2] == counts[1]
    host = [t.clone().requires_grad_() for t in (x, s)]
    expected = (torch.sin(host[0] * 2) * host[1])[1:3]
    (expected * 3).sum().backward()
    assert_same([found["y"], *(t.grad for t in given)], [expected, *(t.grad for t in host)])
    assert found["n"].item() == x.argmax().item()
    assert not found["n"].requires_grad


@pytest.mark.parametrize(
    ("of_jax", "of_torch"),
    [
        (lambda z: z * z * (1 + 2j), lambda z: z * z * (1 + 2j)),
        (lambda z: jnp.real(z * z * (1 + 2j)), lambda z: (z * z * (1 + 2j)).real),
        (lambda z: jnp.exp(z) * jnp.conj(z), lambda z: z.exp() * z.conj()),
    ],
    ids=["complex", "real", "conjugate"],
)
def test_gradients_of_complex_tensors_are_pytorchs(of_jax, of_torch):
    host = torch.tensor([1 + 2j, 3 - 1j])
    gradients = []
    for function, device in ((j2t_autograd(of_jax), "xla"), (of_torch, "cpu")):
        z = host.to(device).requires_grad_()
        function(z).abs().square().sum().backward()
        gradients.append(z.grad.cpu())
    torch.testing.assert_close(*gradients)


def test_without_a_wanted_gradient_jax_is_just_called():
    f = j2t_autograd(lambda x: jax.nn.relu(x))
    assert f(torch.tensor([-1.0, 2.0], device="xla")).tolist() == [0.0, 2.0]
    with torch.no_grad():
        assert not f(torch.ones(2, device="xla", requires_grad=True)).requires_grad


def test_a_function_with_a_new_number_in_each_step_keeps_its_latest_recordings():
    recorded = []

    @assume_pure
    def scaled(x, number):
        recorded.append(number)
        return x * number

    x = torch.tensor([1.0, 2.0], device="xla")
    count = 257  # one more than are kept
    for number in (*range(count), count - 1, 0):
        result = scaled(x, number)
        assert result.shape == (2,)
    assert recorded == [*range(count), 0]
    assert scaled(x, 5).tolist() == [5.0, 10.0]
