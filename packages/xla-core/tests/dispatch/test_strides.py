"""Operators that C++ defines by strides, on views, which report the strides of contiguous tensors."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "rows": lambda x: x[1:],
    "columns": lambda x: x[:, 1:4],
    "every second": lambda x: x[:, ::2],
    "a row, expanded": lambda x: x[:1].expand(3, 6),
    "a column, expanded": lambda x: x[:, :1].expand(4, 3),
    "tall": lambda x: x.reshape(12, 2)[1:],
    "nothing": lambda x: x[:, :0],
    "three dimensions": lambda x: x.reshape(2, 3, 4)[:, :2, :2].permute(2, 0, 1),
    "sizes that differ": lambda x: x.reshape(2, 3, 4),
    "one dimension": lambda x: x[0],
}


def table(device: str) -> torch.Tensor:
    return torch.arange(24.0).reshape(4, 6).to(device)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_fill_diagonal(view: str, wrap: bool, inference: bool) -> None:
    found: list[object] = []
    for device in ("cpu", "xla"):
        with torch.inference_mode(inference):
            x = table(device)
            try:
                assert VIEWS[view](x).fill_diagonal_(-1.0, wrap=wrap).device == x.device
            except RuntimeError as error:
                found.append(str(error))
            found.append(x.tolist())
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_the_gradient_of_fill_diagonal() -> None:
    found = []
    for device in ("cpu", "xla"):
        weight = torch.ones(3, 4).to(device).requires_grad_()
        product = weight * 2
        product.t()[1:].fill_diagonal_(0.0)
        product.sum().backward()
        assert weight.grad is not None
        found.append(weight.grad.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("view", ["whole", "transposed", "rows", "columns", "every second"])
def test_stft(view: str, inference: bool) -> None:
    found = []
    for device, center in itertools.product(("cpu", "xla"), (False, True)):
        with torch.inference_mode(inference):
            signals = torch.randn(60, 60, generator=torch.Generator().manual_seed(1)).to(device)
            window = torch.hann_window(16).to(device)
            part = VIEWS[view](signals) if view != "columns" else signals[:, 3:40]
            spectrum = torch.stft(part, 16, 4, window=window, center=center, return_complex=True)
            found.append(spectrum.cpu())
    for cpu, xla in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(xla, cpu, rtol=1e-4, atol=1e-4)  # sums in another order


EMPTY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of an expanded number": lambda x: x[0, 0].expand(3).narrow(0, 1, 0),
    "no rows": lambda x: x[:1].expand(3, 6)[:0],
    "no columns": lambda x: x[:1].expand(3, 6)[:, :0],
    "expanded to nothing": lambda x: x[0].expand(0, 6),
    "windows": lambda x: x.flatten().unfold(0, 3, 1)[:, :0],
}
FILLS: dict[str, Callable[[torch.Tensor], object]] = {
    "fill_": lambda v: v.fill_(7.0),
    "fill_ with a tensor": lambda v: v.fill_(torch.tensor(7.0, device=v.device)),
    "zero_": lambda v: v.zero_(),
    "assignment": lambda v: v.__setitem__(slice(None), 5.0),
    "copy_": lambda v: v.copy_(torch.tensor(9.0, device=v.device)),
    "uniform_": lambda v: v.uniform_(),
}


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("view", EMPTY)
def test_a_write_to_an_empty_part_of_what_repeats_writes_nothing(view: str, fill: str) -> None:
    x = table("xla")
    FILLS[fill](EMPTY[view](x))
    assert torch.equal(x.cpu(), table("cpu"))


def test_as_strided_warns_where_strides_of_the_tensor_itself_are_wrong() -> None:
    x = table("xla")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x.as_strided((2, 2), (6, 1))
        x[1:].as_strided((2, 2), (6, 1))
        x[:, 1:4].contiguous().as_strided((2, 2), (3, 1))
        x[1].view(2, 3).as_strided((2, 2), (3, 1))
        x[:, ::2].fill_(1.0)
        x.t().resize_(2, 2)
    for view in (x[:, 1:4], x.t()):
        with pytest.warns(UserWarning, match=r"call .contiguous\(\)") as caught:
            view.as_strided((2, 2), (view.stride(0), 1))
        assert caught[0].filename == __file__
