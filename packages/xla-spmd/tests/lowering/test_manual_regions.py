"""Regions of manual sharding: which become operations of Shardy, which stay marks; that both compute rightly."""

from __future__ import annotations

import pytest
import torch

import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch_xla.experimental.scan import scan
from xla_spmd.lowering.manual_collectives import all_reduce

SPEC = ("data", "model")
REGION, MARK = "sdy.manual_computation", "SPMDFullToShardShape"


def split(mesh, shape=(8, 4)):
    """A value on the host and the same over the mesh."""
    torch.manual_seed(0)
    host = torch.randn(shape)
    tensor = host.to("xla")
    xs.mark_sharding(tensor, mesh, SPEC[: len(shape)])
    return host, tensor


def parts(tensor, mesh):
    return xs.enable_manual_sharding(tensor, SPEC, mesh=mesh).global_tensor


def whole(part, mesh, shape=(8, 4)):
    return xs.disable_manual_sharding(part, SPEC, shape, mesh=mesh).global_tensor


def regions(*tensors):
    """How many operations of Shardy's the pending program of ``tensors`` has; it has no marks then."""
    text = xm.get_stablehlo(list(tensors))
    assert (REGION in text) != (MARK in text)
    return text.count(REGION)


def test_a_region_is_one_operation(mesh):
    """With constants that are used on both sides, numbers, and a whole value that each device uses as it is."""
    host, tensor = split(mesh)
    factor = torch.tensor(3.0)
    scale = factor.to("xla")
    shift = torch.arange(2.0, device="xla")
    part = parts(tensor * 2, mesh)
    result = whole((part + 0.5) * scale + shift, mesh) + shift.sum()
    assert regions(result) == 1
    wanted = (host * 2 + 0.5) * factor + torch.arange(2.0).repeat(2) + 1
    torch.testing.assert_close(result.cpu(), wanted)


def test_regions_keep_their_order(mesh):
    """Two are connected through a whole value; a third, begun first, is independent of both."""
    host, tensor = split(mesh)
    early = parts(tensor, mesh)
    first = whole(parts(tensor, mesh).exp(), mesh)
    total = first.sum()
    second = whole(parts(first / total, mesh).sqrt(), mesh)
    late = whole(early.neg(), mesh)
    assert regions(first, second, late) == 3
    wanted = host.exp()
    for got, want in ((first, wanted), (second, (wanted / wanted.sum()).sqrt()), (late, -host)):
        torch.testing.assert_close(got.cpu(), want)


def test_several_parts_and_results(mesh):
    host, tensor = split(mesh)
    a, b = parts(tensor, mesh), parts(tensor.t().t() + 1, mesh)
    total, product = whole(a + b, mesh), whole(a * b, mesh)
    plain = whole(parts(tensor, mesh), mesh)
    assert regions(total, product, plain) == 3
    torch.testing.assert_close(total.cpu(), 2 * host + 1)
    torch.testing.assert_close(product.cpu(), host * (host + 1))
    torch.testing.assert_close(plain.cpu(), host)


def test_devices_talk_in_a_region(mesh):
    host, tensor = split(mesh)
    part = parts(tensor, mesh)
    summed = all_reduce("sum", part, 1.0, [[0, 2, 4, 6], [1, 3, 5, 7]])
    result = whole(part / summed, mesh)
    assert regions(result) == 1
    wanted = host / host.reshape(4, 2, 4).sum(0).repeat(4, 1)
    torch.testing.assert_close(result.cpu(), wanted)


@pytest.mark.parametrize(("function", "count"), [(torch.sin, 2), (torch.exp, 0)])
def test_gradients_through_a_region(mesh, function, count):
    """The gradient of ``exp`` is computed from parts of the forward region: what it takes depends on its result."""
    host, tensor = split(mesh)
    host.requires_grad_()
    tensor.requires_grad_()
    wanted = (function(host).square() * 0.5).sum()
    wanted.backward()
    loss = (whole(function(parts(tensor, mesh)), mesh).square() * 0.5).sum()
    loss.backward()
    assert regions(loss, tensor.grad) == count
    torch.testing.assert_close(loss.cpu(), wanted)
    torch.testing.assert_close(tensor.grad.cpu(), host.grad)


def test_a_region_in_a_loop(mesh):
    host, tensor = split(mesh)
    steps = torch.arange(3.0, device="xla")

    def body(carry, step):
        grown = whole(parts(carry, mesh) * 2 + 1, mesh)
        return grown, (grown * step).sum()

    carry, sums = scan(body, tensor, steps)
    assert regions(carry, sums) == 1
    wanted = []
    for step in range(3):
        host = host * 2 + 1
        wanted.append((host * step).sum())
    torch.testing.assert_close(carry.cpu(), host)
    torch.testing.assert_close(sums.cpu(), torch.stack(wanted))


@pytest.mark.parametrize("function", [lambda x: x.softmax(0), lambda x: torch.fft.fft(x).abs()])
def test_what_devices_compute_is_theirs(mesh, function):
    """A transform outside of regions gets its dimension whole; a device's own part is whole already."""
    host, tensor = split(mesh)
    result = whole(function(parts(tensor, mesh)), mesh)
    assert regions(result) == 1
    text = xm.get_stablehlo([result])
    region, called = text.partition(REGION)[2], text.partition("func.func private")[2]
    assert "sharding_constraint" not in region.partition("sdy.return")[0] + called
    pieces = [function(own) for own in host.reshape(4, 2, 2, 2).transpose(1, 2).reshape(8, 2, 2)]
    wanted = torch.stack(pieces).reshape(4, 2, 2, 2).transpose(1, 2).reshape(8, 4)
    torch.testing.assert_close(result.cpu(), wanted)


def test_parts_that_outlive_the_program_stay_marks(mesh):
    host, tensor = split(mesh)
    part = parts(tensor, mesh) * 2
    assert regions(part) == 0
    with pytest.raises(RuntimeError, match="each device has its own; to read them"):
        part.sum().item()
    torch.testing.assert_close(whole(part, mesh).cpu(), host * 2)


def test_uneven_parts_stay_marks(mesh):
    host = torch.arange(5.0)
    tensor = host.to("xla")
    part = xs.enable_manual_sharding(tensor, ("data",), mesh=mesh).global_tensor
    result = xs.disable_manual_sharding(part + 1, ("data",), (5,), mesh=mesh).global_tensor
    assert regions(result) == 0
    torch.testing.assert_close(result.cpu(), host + 1)
