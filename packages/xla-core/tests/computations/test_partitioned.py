"""What a scan by hand is made of, beside scan and beside PyTorch on the CPU."""

from __future__ import annotations

import pytest
import torch

import torch_xla.core.xla_builder as xb
from torch_xla.experimental import pytreeify, scan


def step(carry, x):
    new = torch.tanh(carry["h"] * x["a"])
    return {"h": new}, new * 2


def test_the_passes_of_a_scan_by_hand():
    init = {"h": torch.randn(3)}
    xs = {"a": torch.randn(4, 3)}
    leaves = init["h"].clone().requires_grad_(), xs["a"].clone().requires_grad_()
    carry, total = {"h": leaves[0]}, torch.zeros(())
    for i in range(4):
        carry, y = step(carry, {"a": leaves[1][i]})
        total = total + y.sum()
    (total + carry["h"].sum()).backward()

    init, xs = ({k: v.to("xla") for k, v in tree.items()} for tree in (init, xs))
    forward, alias_input, backward = scan.value_and_grad_partitioned(step, init, xs)
    carry, kept = init, []
    for i in range(4):
        carry, (y, activations) = forward(carry, {"a": xs["a"][i]})
        kept.append(activations)
        assert not y.requires_grad
    stacked = {"h": torch.stack([k["h"] for k in kept])}
    stacked_carry, stacked_xs = alias_input(stacked, xs)
    gradient, by_x = {"h": torch.ones(3, device="xla")}, []
    for i in reversed(range(4)):
        activations = ({"h": stacked_carry["h"][i]}, {"a": stacked_xs["a"][i]})
        gradient, of_x = backward(gradient, (torch.ones(3, device="xla"), activations))
        by_x.append(of_x["a"])
    torch.testing.assert_close(gradient["h"].cpu(), leaves[0].grad)
    torch.testing.assert_close(torch.stack(by_x[::-1]).cpu(), leaves[1].grad)


def test_trees_without_none():
    tree = {"a": [1, None, 2], "b": None}
    flat, unflatten = scan.tree_flatten_none(tree)
    assert flat == [1, 2]
    assert unflatten([3, 4]) == {"a": [3, None, 4], "b": None}


def test_cutting_a_sequence():
    assert scan.split([1, 2, 3, 4], 1, 0, 3) == ([1], [], [2, 3, 4])
    with pytest.raises(ValueError, match="do not add up to a sequence of 4 items"):
        scan.split([1, 2, 3, 4], 1, 2)


def test_items_in_hlo():
    values, item = torch.arange(12.0).reshape(4, 3), torch.full((3,), -1.0)

    def body(xs, y, index):
        written = scan.dynamic_update_slice(xs, y, index)
        return xb.Op.tuple((scan.dynamic_slice(xs, index), written))

    given = [t.to("xla") for t in (values, item, torch.tensor(2))]
    computation = xb.create_computation("items", body, [xb.tensor_shape(t) for t in given])
    found, written = xb.xla_computation_as_func(computation)(given)
    expected = values.clone()
    expected[2] = item
    assert torch.equal(found.cpu(), values[2])
    assert torch.equal(written.cpu(), expected)


@pytreeify.pytreeify
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tree, factor):
        ctx.factor = factor
        return {"up": tree["x"] * factor, "pair": [tree["y"][0] + 1]}

    @staticmethod
    def backward(ctx, gradients):
        return {"x": gradients["up"] * ctx.factor, "y": [gradients["pair"][0]]}, None


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_autograd_functions_of_trees(device):
    x, y = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    result = Scaled.apply({"x": x, "y": [y]}, 3.0)
    assert result["up"].tolist() == [3.0, 3.0]
    (result["up"].sum() + 2 * result["pair"][0].sum()).backward()
    assert x.grad.tolist() == [3.0, 3.0]
    assert y.grad.tolist() == [2.0, 2.0]
