"""What XLA's partitioner would compute wrongly by itself, though sizes divide."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import torch_xla
import torch_xla.distributed.spmd as xs
from xla_core.extension_api.programs import all_programs
from xla_spmd.reports import program_report

CASES = {
    # windows of one value, filled with zeros and with something else
    "scans": ((8, 6), lambda a: (a.cumsum(0), a.cumprod(0), a.logcumsumexp(0))),
    "pads": ((8, 6), lambda a: (F.pad(a, (0, 0, 1, 2)), F.pad(a, (0, 0, 1, 2), value=3.0))),
    "pools": (
        (1, 2, 16, 4),
        lambda a: (
            F.avg_pool2d(a, 3, 1, 1),
            F.max_pool2d(a - 9, 3, 1, 1),
            F.max_pool2d(a, 3, 1, 1),
        ),
    ),
    # strided slices: their gradients put zeros between elements
    "strides": ((16, 6), lambda a: (a[::2] * 2, a[1:] * 3, a[1::3].sum())),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    shape, function = CASES[name]
    line = xs.Mesh(np.arange(8), (8,), ("data",))
    host = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    device = host.to("xla")
    dimension = shape.index(max(shape))
    xs.mark_sharding(device, line, ["data" if i == dimension else None for i in range(len(shape))])
    both = [function(t.requires_grad_()) for t in (host, device)]
    for results in both:
        sum((r * r).sum() for r in results).backward()
    torch_xla.sync()
    for a, b in [*zip(*both, strict=True), (host.grad, device.grad)]:
        torch.testing.assert_close(b.detach().cpu(), a.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [11, 3])
def test_a_scatter_adds_its_updates_only(mesh, rows):
    """Rows of updates that do not divide: nothing that lies behind them is added to a row."""
    index = torch.arange(rows) % 2
    host, device = torch.zeros(2, 7), torch.zeros(2, 7).to("xla")
    for table in (host, device):
        updates = torch.ones(rows, 7).to(table.device)
        if table is device:
            xs.mark_sharding(updates, mesh, ("data", None))
        table.index_add_(0, index.to(table.device), updates.cos())
    torch.testing.assert_close(device.cpu(), host)


CONVOLUTIONS = {
    "plain": ((4, 4, 16, 8), (8, 4, 4, 3), {"padding": 1}),
    "strided": ((4, 4, 16, 8), (8, 4, 4, 3), {"padding": 2, "stride": 2}),
    "dilated": ((4, 4, 16, 8), (8, 4, 4, 3), {"padding": 3, "dilation": 2}),
    "two groups": ((4, 4, 16, 8), (8, 2, 4, 3), {"groups": 2}),
    "ten groups": ((4, 20, 8, 8), (10, 2, 4, 3), {"groups": 10, "padding": 1}),
    "depthwise": ((4, 4, 16, 8), (8, 1, 4, 3), {"groups": 4, "padding": 1}),
    "many positions": ((4, 10, 16, 16), (10, 1, 12, 8), {"groups": 10}),
    "transposed": ((4, 4, 8, 8), (4, 8, 4, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "transposed groups": ((4, 20, 8, 8), (20, 1, 4, 2), {"groups": 10, "stride": 2}),
    "1d": ((4, 4, 16), (8, 4, 4), {"padding": 2}),
    "3d": ((2, 4, 8, 6, 4), (4, 4, 4, 2, 3), {"padding": 1}),
    "uneven": ((3, 5, 11, 9), (7, 5, 5, 3), {"padding": 2, "stride": 2}),
}


def convolved(name, inputs, kernel, **settings):
    form = F.conv_transpose2d if name.startswith("transposed") else None
    form = form or {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[inputs.dim()]
    return form(inputs, kernel, **settings)


def specs(rank, name):
    """Places for the axis ``data`` (and ``model``): the first window, both, channels, batches."""
    places = {
        "window": {2: "data"},
        "both axes": {2: ("data", "model")},
        "channels": {1: "model", 2: "data"},
        "batch": {0: "data"},
        "features": {0: "model"},
        "whole": {},
    }[name]
    return tuple(places.get(i) for i in range(rank))


PAIRS = [
    ("window", "window"), ("batch", "whole"), ("window", "features"), ("both axes", "channels"),
    ("whole", "window"), ("window", "whole"),
]  # fmt: skip
COMBINED = [
    (name, pair)
    for i, name in enumerate(CONVOLUTIONS)
    for pair in dict.fromkeys((*PAIRS[:2], PAIRS[2 + i % 4]))
]


@pytest.mark.parametrize(("name", "pair"), COMBINED, ids=str)
def test_convolutions_of_split_inputs_and_kernels(mesh, name, pair):
    """Values and both gradients, the result's own split among them, as the CPU computes them."""
    *shapes, settings = CONVOLUTIONS[name]
    generator = torch.Generator().manual_seed(0)
    host = [torch.randn(shape, generator=generator) for shape in shapes]
    device = [t.to("xla") for t in host]
    for tensor, spec in zip(device, pair, strict=True):
        xs.mark_sharding(tensor, mesh, specs(tensor.dim(), spec))
    results = []
    for values in (host, device):
        result = convolved(name, *[t.requires_grad_() for t in values], **settings)
        if values is device and pair[1] == "window":
            xs.mark_sharding(result, mesh, specs(result.dim(), "window"))
        (result * result.detach().cos()).sum().backward()
        results.append(result)
    torch_xla.sync()
    pairs = [tuple(results), *((x.grad, y.grad) for x, y in zip(host, device, strict=True))]
    for wanted, found in pairs:
        torch.testing.assert_close(found.detach().cpu(), wanted.detach(), rtol=1e-3, atol=1e-3)


def test_a_convolution_of_split_batches_is_computed_in_parts(mesh):
    """Only gradients of kernels are summed over devices: nothing else is sent."""
    for groups in (1, 4, 20):
        inputs, kernel = torch.ones(8, 20, 8, 8).to("xla"), torch.ones(20, 20 // groups, 3, 3)
        kernel = kernel.to("xla").requires_grad_()
        xs.mark_sharding(inputs, mesh, (("data", "model"), None, None, None))
        torch_xla.sync()
        F.conv2d(inputs, kernel, padding=1, groups=groups).square().sum().backward()
        torch_xla.sync()
        kinds = {c.kind for c in program_report.collectives(all_programs()[-1])}
        assert kinds == {"all-reduce"}


def test_a_convolution_beside_values_laid_out_by_hand(mesh):
    """Such programs are another partitioner's; convolutions of parts are each device's own."""
    host, kernel = torch.randn(4, 4, 16, 8), torch.randn(8, 4, 4, 3)
    inputs, weight = host.to("xla"), kernel.to("xla")
    part = xs.enable_manual_sharding(inputs, ("data", None, None, None), mesh=mesh).global_tensor
    own = F.conv2d(part, weight)
    own = xs.disable_manual_sharding(own, ("data", None, None, None), (4, 8, 13, 6), mesh=mesh)
    again = host.to("xla")
    xs.mark_sharding(again, mesh, (None, None, "data", None))
    xs.mark_sharding(weight, mesh, ("model", None, None, None))
    both = F.conv2d(again, weight)
    torch_xla.sync()
    for found in (own, both):
        torch.testing.assert_close(found.cpu(), F.conv2d(host, kernel), rtol=1e-4, atol=1e-4)


WINDOWS = {
    "max_pool": lambda a: F.max_pool2d(a, 3, 2, 1),
    "avg_pool": lambda a: F.avg_pool2d(a, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "adaptive": lambda a: F.adaptive_avg_pool2d(a, (3, 2)) + F.adaptive_max_pool2d(a, (3, 2)),
    "unfold": lambda a: F.unfold(a, 3, 1, 1, 2),
    "bilinear": lambda a: F.interpolate(a, size=(7, 13), mode="bilinear", align_corners=True),
    "bicubic": lambda a: F.interpolate(a, scale_factor=2.0, mode="bicubic"),
    "nearest": lambda a: F.interpolate(a, size=(7, 13)),
    "reflect": lambda a: F.pad(a, (2, 1, 3, 2), mode="reflect"),
    "replicate": lambda a: F.pad(a, (2, 1, 3, 2), mode="replicate"),
    "circular": lambda a: F.pad(a, (2, 1, 3, 2), mode="circular"),
    "cut and filled": lambda a: F.pad(a, (2, -1, -1, 2), value=2.0),
    "group_norm": lambda a: F.group_norm(a, a.shape[1]),
    "cumprod": lambda a: a.cumprod(2),
    "strides": lambda a: a[:, :, 1::3, ::2] * 2,
    "rows of windows": lambda a: a.unfold(2, 3, 2).cos(),
    "roll": lambda a: a.roll((3, 1), (2, 3)).flip(2),
    "index": lambda a: a[:, :, [1, 4, 2, 2]],
    "sort": lambda a: a.sort(2)[0],
}


@pytest.mark.parametrize("size", [(4, 4, 16, 8), (3, 5, 11, 9)], ids=["even", "uneven"])
@pytest.mark.parametrize("name", WINDOWS)
def test_random_splits_of_what_windows_move_along(name, size):
    """Parts that several devices hold, and that one does; split results; values and gradients."""
    draw, generator = random.Random(name), torch.Generator().manual_seed(0)
    for grid in ((4, 2), (8, 1)):
        devices = xs.Mesh(np.arange(8), grid, ("data", "model"))
        host = torch.randn(size, generator=generator)
        device = host.to("xla")
        xs.mark_sharding(device, devices, _drawn(draw))
        both = [WINDOWS[name](t.requires_grad_()) for t in (host, device)]
        if both[1].dim() == 4:
            xs.mark_sharding(both[1], devices, _drawn(draw))
        for result in both:
            result.square().sum().backward()
        torch_xla.sync()
        for a, b in [tuple(both), (host.grad, device.grad)]:
            torch.testing.assert_close(b.detach().cpu(), a.detach(), rtol=2e-3, atol=2e-3)


def _drawn(draw):
    """A random place, or none, for each axis, most often where windows move."""
    spec = [(), (), (), ()]
    for axis in draw.sample(("data", "model"), 2):
        if draw.random() < 0.8:
            spec[draw.choice((0, 1, 2, 2, 3, 3))] += (axis,)
    return tuple(entry or None for entry in spec)


def test_one_filling_needs_no_barrier(mesh):
    tensor = torch.ones(8, 6).to("xla")
    xs.mark_sharding(tensor, mesh, ("data", None))
    total = tensor.cumsum(0) + F.pad(tensor, (1, -1))
    torch_xla.sync()
    assert total.cpu()[1, 1] == 3
    assert "opt-barrier" not in all_programs()[-1].executable.optimized_hlo()


COMPLEX = torch.complex64
TRANSFORMS = {
    "fft": (COMPLEX, torch.fft.fft),
    "fft of the first": (COMPLEX, lambda a: torch.fft.fft(a, dim=0)),
    "fft2": (torch.float32, torch.fft.fft2),
    "ifft2": (COMPLEX, torch.fft.ifft2),
    "fftn": (COMPLEX, torch.fft.fftn),
    "rfft of the first": (torch.float32, lambda a: torch.fft.rfft(a, dim=0)),
    "rfft2": (torch.float32, torch.fft.rfft2),
    "rfftn": (torch.float32, lambda a: torch.fft.rfftn(a, dim=(0, 1))),
    "irfft2": (COMPLEX, torch.fft.irfft2),
    "hfft": (COMPLEX, torch.fft.hfft),
    "stft": (
        torch.float32,
        lambda a: torch.stft(
            a.flatten(1), 8, window=torch.ones(8, device=a.device), return_complex=True
        ),
    ),
}


@pytest.mark.parametrize(
    "size", [(8, 8, 16), (5, 7, 9), (9, 5, 7)], ids=["even", "uneven", "other uneven"]
)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_fourier_transforms_of_split_dimensions(mesh, name, size):
    """Values and gradients; what is split of the result is drawn, too. One of these ended the process."""
    kind, transform = TRANSFORMS[name]
    draw = random.Random(f"{name} {size}")
    for spec in [(None, "data", "model"), ("model", None, "data"), (None, ("data", "model"), None)]:
        host = torch.randn(size, dtype=kind, generator=torch.Generator().manual_seed(0))
        device = host.to("xla")
        xs.mark_sharding(device, mesh, spec)
        results = []
        for values in (host, device):
            result = transform(values.requires_grad_())
            if values is device:
                places = {draw.randrange(result.dim()): draw.choice(["data", ("data", "model")])}
                xs.mark_sharding(result, mesh, tuple(places.get(i) for i in range(result.dim())))
            result.abs().square().sum().backward()
            results.append(result)
        torch_xla.sync()
        for wanted, found in [tuple(results), (host.grad, device.grad)]:
            scale = float(wanted.detach().abs().max())
            torch.testing.assert_close(
                found.detach().cpu() / scale, wanted.detach() / scale, rtol=1e-4, atol=1e-5
            )


def test_a_transform_beside_values_laid_out_by_hand(mesh):
    """Such programs are another partitioner's; transforms of parts are each device's own."""
    host = torch.randn(8, 4, 16)
    values, again = host.to("xla"), host.to("xla")
    spec = ("data", None, None)
    part = xs.enable_manual_sharding(values, spec, mesh=mesh).global_tensor
    own = xs.disable_manual_sharding(torch.fft.fft2(part).abs(), spec, host.shape, mesh=mesh)
    xs.mark_sharding(again, mesh, (None, "data", "model"))
    both = torch.fft.fft2(again).abs()
    torch_xla.sync()
    for found in (own, both):
        torch.testing.assert_close(found.cpu(), torch.fft.fft2(host).abs(), rtol=1e-4, atol=1e-4)
