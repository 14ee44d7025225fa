"""Strides along sizes that vary: sizes behind them are floors of the length, and one program serves them all."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_xla
from xla_core.varying import families

# four are compiled or tell what strides there are
LENGTHS = (17, 24, 21, 30, 19, 26)
KERNEL, IMAGES = torch.randn(4, 3, 3), torch.randn(4, 3, 3, 3)


def along(length):
    return torch.randn(2, 3, length)


def square(length):
    return torch.randn(2, 3, length, length)


STEPS = {
    "convolution": (lambda x: F.conv1d(x, KERNEL.to(x.device), stride=2, padding=1), along),
    "convolution by three": (lambda x: F.conv1d(x, KERNEL.to(x.device), stride=3), along),
    "convolution of images": (lambda x: F.conv2d(x, IMAGES.to(x.device), stride=2), square),
    "dilated": (lambda x: F.conv1d(x, KERNEL.to(x.device), stride=2, dilation=2), along),
    "transposed": (lambda x: F.conv_transpose1d(x, KERNEL[:3].to(x.device), stride=2), along),
    "maxima": (lambda x: F.max_pool1d(x, 2), along),
    "maxima that overlap": (lambda x: F.max_pool2d(x, 3, 2, 1), square),
    "maxima, the last part too": (lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True), square),
    "averages": (lambda x: F.avg_pool1d(x, 3, 2, 1), along),
    "enlarged three times": (lambda x: F.interpolate(x, scale_factor=3), along),
    "enlarged by a half": (
        lambda x: F.interpolate(x, scale_factor=1.5, mode="nearest-exact"),
        along,
    ),
    "made of one size": (lambda x: F.interpolate(x, size=(20, 9)), square),
    "as large as before a stride": (
        lambda x: F.interpolate(x[:, :, ::2, 1::2], size=x.shape[2:]) + x,
        square,
    ),
    "linear": (lambda x: F.interpolate(x[:, :, ::2], x.shape[2], mode="linear"), along),
    "bilinear": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
        square,
    ),
    "bicubic": (lambda x: F.interpolate(x, (11, 13), mode="bicubic"), square),
    "every other element": (lambda x: x[:, :, ::2] * 2, along),
    "every third from the second on": (lambda x: x[:, :, 1::3].sin(), along),
}


@pytest.mark.parametrize("name", STEPS)
def test_strides_forward_and_backward(name, run_lengths):
    function, make = STEPS[name]

    def step(x):
        x = x.detach().requires_grad_()
        y = function(x)
        y.square().sum().backward()
        return y.detach(), x.grad

    torch.manual_seed(7)
    served = run_lengths(step, lambda n: (make(n),), LENGTHS, {"rtol": 1e-4, "atol": 1e-4})
    assert served >= 2, families.kept_out()


class Net(nn.Module):
    """Strided convolutions, a shortcut, pooling, and features that are as many as places are left."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.shortcut = nn.Conv2d(4, 4, 1, stride=2)
        self.head = nn.Linear(4, 5)

    def forward(self, images):
        x = F.max_pool2d(self.norm(self.first(images)).relu(), 3, 2, 1)
        x = self.second(x).relu() + self.shortcut(x)
        return self.head(x.flatten(2).mean(2))


def losses(device, sizes):
    torch.manual_seed(0)
    net = Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    values = []
    for height, width in sizes:
        optimizer.zero_grad()
        images = torch.randn(3, 3, height, width, generator=torch.Generator().manual_seed(height))
        loss = F.cross_entropy(net(images.to(device)), torch.arange(3, device=device))
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        values.append(loss.detach())
    return [value.item() for value in values]


def test_a_convolutional_net_takes_images_of_any_size(varying, counted):
    draw = random.Random(1)
    sizes = [(draw.randint(24, 48), draw.randint(24, 48)) for _ in range(8)]
    wanted = losses("cpu", sizes)
    before = counted(families.SERVED)
    assert losses("xla", sizes) == pytest.approx(wanted, abs=1e-3)
    assert counted(families.SERVED) - before >= 3, families.kept_out()


def box_losses(device, sizes, levels):
    """Losses, and gradients' sums, of a detector: each place of a level is to have the score of the nearest box."""
    draw = torch.Generator().manual_seed(3)
    kernel = (torch.randn(3, 3, 3, 3, generator=draw) / 5).to(device).requires_grad_()
    values = []
    for height, width, boxes in sizes:
        x = torch.randn(2, 3, height, width, generator=draw).to(device)
        centres = (torch.rand(boxes, 2, generator=draw) * 10).to(device)
        scores, places = [], []
        for level in range(levels):
            x = F.conv2d(x, kernel, stride=1 if levels == 1 else 2, padding=1)
            high, wide = x.shape[2:]
            scores.append(x.flatten(2).transpose(1, 2))
            rows = torch.arange(high, device=device)[:, None].expand(high, wide)
            columns = torch.arange(wide, device=device)[None].expand(high, wide)
            places.append(torch.stack([rows, columns], -1).view(-1, 2) * 2**level)
        distances = (torch.cat(places)[:, None] - centres[None]).square().sum(-1)
        nearest = distances.argmin(1)
        loss = F.cross_entropy(torch.cat(scores, 1).flatten(0, 1), (nearest % 3).repeat(2))
        (gradient,) = torch.autograd.grad(loss, kernel)
        torch_xla.sync()
        values += [loss.item(), gradient.abs().sum().item()]
    return values


@pytest.mark.parametrize("levels", [1, 3])
def test_height_width_and_number_of_boxes_vary_at_once(levels, varying, counted):
    sizes = [(6, 11, 2), (15, 6, 5), (10, 15, 3), (12, 16, 3), (14, 11, 4), (9, 13, 4), (11, 7, 5)]
    if levels == 3:  # sizes that are no multiples of the strides
        sizes = [(4 * height + height % 3, 4 * width + 3, boxes) for height, width, boxes in sizes]
    wanted = box_losses("cpu", sizes, levels)
    before = counted(families.SERVED)
    assert box_losses("xla", sizes, levels) == pytest.approx(wanted, rel=1e-4)
    assert counted(families.SERVED) - before >= (3 if levels == 1 else 2), families.kept_out()
