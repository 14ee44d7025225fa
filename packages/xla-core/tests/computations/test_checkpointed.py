"""Functions that are recorded as a whole, inside those whose values PyTorch computes again or keeps elsewhere."""

from __future__ import annotations

import contextlib
from functools import partial

import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from torch_xla.experimental.assume_pure import assume_pure, j2t_autograd
from torch_xla.experimental.gru import GRU
from torch_xla.experimental.scan import scan
from torch_xla.experimental.scan_layers import scan_layers
from xla_core.testing.against_cpu import assert_same


def scanned(x):
    carry, ys = scan(lambda c, a: (c * a.sin(), c + a), x.sum(0), x)
    return carry.sum() + ys.square().sum()


def pure(x):
    return assume_pure(lambda a: torch.sin(a) * a)(x).sum()


def of_jax(x):
    return j2t_autograd(lambda a: jnp.sin(a) * a)(x).sum()


def layers(x):
    torch.manual_seed(1)
    modules = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to("xla") for _ in range(2)]
    return scan_layers(modules, x).square().sum()


def recurrent(x):
    torch.manual_seed(1)
    return GRU(4, 4).to("xla")(x[:, None])[0].square().sum()


FUNCTIONS = [scanned, pure, of_jax, layers, recurrent]


def gradient(function, call, around=contextlib.nullcontext):
    x = torch.linspace(-1, 1, 12, device="xla").reshape(3, 4).requires_grad_()
    with around():
        value = call(function, x)
        value.backward()
    return [value.detach(), x.grad]


def direct(function, x):
    return function(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_computed_again(function, reentrant):
    call = partial(checkpoint, use_reentrant=reentrant)
    assert_same(gradient(function, call), gradient(function, direct))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_saved_goes_through_hooks(function):
    assert_same(gradient(function, direct, save_on_cpu), gradient(function, direct))


def test_a_body_recorded_in_a_backward_pass_has_gradients_of_its_own():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                (inner,) = torch.autograd.grad(scanned(x), x)
            return gradient * inner

    assert_same(gradient(Twice.apply, direct)[1], gradient(scanned, direct)[1])
