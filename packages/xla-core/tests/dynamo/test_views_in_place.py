"""Views in place (``t_``, ``unsqueeze_``, ``as_strided_``) of what a compiled function computes."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

import torch_xla  # noqa: F401  the device


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def restrided(x):
    y = x * 2
    y.as_strided_((2, 2), (2, 1), 1)
    return y + 1


def restrided_and_written(x):
    y = x.clone()
    y.as_strided_((2, 2), (2, 1), 1).add_(3)
    return y


def restrided_view_of_a_result(x):
    y = x * 2
    z = y.t()
    z.as_strided_((2, 2), (1, 3), 0)
    return y, z + 0


def transposed_view_of_an_argument(x):
    y = x[1:]
    y.t_()
    y.add_(1)
    return y * 2


def several(x):
    y = (x * 2).t()
    y.unsqueeze_(0)
    y[0, 1] = 7
    return y, y.sin().squeeze_(0).transpose_(0, 1).swapaxes_(0, 1).swapdims_(0, 1)


@pytest.mark.parametrize(
    "function",
    [
        restrided,
        restrided_and_written,
        restrided_view_of_a_result,
        transposed_view_of_an_argument,
        several,
    ],
)
def test_the_result_has_the_new_shape(function):
    given = torch.arange(9.0).reshape(3, 3)
    here, there = given.clone(), given.to("xla")
    wanted = pytree.tree_leaves(function(here))
    found = pytree.tree_leaves(torch.compile(function, backend="openxla")(there))
    for w, f in zip(wanted, found, strict=True):
        torch.testing.assert_close(f.cpu(), w)
    torch.testing.assert_close(there.cpu(), here)


def test_the_gradient():
    def f(x):
        y = x.sin()
        y.t_()
        return (y * torch.arange(6.0, device=x.device).view(3, 2)).sum()

    here = torch.arange(6.0).view(2, 3).requires_grad_()
    there = here.detach().to("xla").requires_grad_()
    f(here).backward()
    torch.compile(f, backend="openxla")(there).backward()
    torch.testing.assert_close(there.grad.cpu(), here.grad)


def test_an_xla_tensor_that_nothing_records_is_refused():
    tensor = torch.arange(6.0).to("xla")
    torch.compile(lambda x: x + 1, backend="openxla")(tensor)
    with torch._C._DisableTorchDispatch(), pytest.raises(RuntimeError, match="nothing can record"):
        torch.ops.aten.as_strided_.default(tensor, (2,), (1,), 0)
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]
