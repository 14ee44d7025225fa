"""Operators that C++ defines by strides, on views, which report the strides of contiguous tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

import torch_xla
from torch_xla.experimental.capture import capture

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


# windows made of the strides that a tensor reports, as a script makes them
WINDOWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "overlapping rows": lambda v: v.as_strided(
        (v.shape[0] * 2 - 1, *v.shape[1:]), (v.stride(0) // 2, *v.stride()[1:])
    ),
    "frames": lambda v: v.as_strided((v.shape[0], 2, 2), (v.stride(0), v.stride(1), v.stride(1))),
    "the diagonal": lambda v: v.as_strided((2,), (v.stride(0) + v.stride(1),)),
    "itself": lambda v: v.as_strided(v.shape, v.stride()),
    "repeated": lambda v: v.as_strided((3, v.shape[1]), (0, v.stride(1))),
    "in place": lambda v: v.clone().as_strided_((2, 2), (v.stride(0), v.stride(1))),
    "a copy": lambda v: torch.as_strided_copy(v, (2, 2), (v.stride(0), v.stride(1))),
}
# (rows, columns) of which a row can be halved: as a transformer splits heads, views on the CPU too
HEADS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x,
    "rows": lambda x: x[1:5],
    "columns": lambda x: x[:, 1:5],
    "every second": lambda x: x[::2],
    "heads": lambda x: x.view(8, 2, 3).transpose(0, 1).reshape(2, 8, 3).view(2, 2, 4, 3)[0],
    "expanded": lambda x: x[:1].expand(4, 6),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("window", [w for w in WINDOWS if w != "in place"])
@pytest.mark.parametrize("view", HEADS)
def test_windows_of_reported_strides(view: str, window: str, inference: bool) -> None:
    if window == "overlapping rows" and view not in ("whole", "rows", "heads"):
        pytest.skip(
            "half a row is no step through this view: the CPU's reads what lies between its rows"
        )
    found = []
    for device in ("cpu", "xla"):
        with torch.inference_mode(inference):
            x = torch.arange(48.0).reshape(8, 6).to(device)
            found.append(WINDOWS[window](HEADS[view](x)).cpu())
    assert torch.equal(*found)


def test_the_gradient_and_a_write_of_such_windows() -> None:
    found = []
    for device in ("cpu", "xla"):
        weight = torch.arange(48.0).reshape(8, 6).to(device).requires_grad_()
        heads = HEADS["heads"](weight * 2)
        chunks = WINDOWS["overlapping rows"](heads)
        (chunks * chunks).sum().backward()
        assert weight.grad is not None
        x = torch.arange(24.0).reshape(4, 6).to(device)
        part = x.t()[1:]
        part.as_strided((2, 2), (part.stride(0) * 2, part.stride(1))).fill_(-1.0)
        found.append((weight.grad.tolist(), x.tolist()))
    assert found[0] == found[1]


def halves(x: torch.Tensor) -> torch.Tensor:
    """Overlapping chunks of a view, as transformers' Longformer makes them."""
    heads = (
        (x * 1).view(8, 2, 2, 3).transpose(0, 1).transpose(1, 2).reshape(4, 8, 3).view(4, 2, 4, 3)
    )
    stride = list(heads.stride())
    stride[1] //= 2
    return heads.as_strided((4, 3, 4, 3), stride).sum(2)


def of_an_argument(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((2, 2, 3), (x.stride(0) * 2, x.stride(1), x.stride(2))) * 1


def argument(device: str) -> torch.Tensor:
    x = torch.arange(96.0).reshape(8, 12).to(device)
    return x.view(8, 4, 3).transpose(0, 1)[:, :2]


@pytest.mark.parametrize("function", [halves, of_an_argument])
def test_compiled_functions_and_captured_steps_have_the_same_windows(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    make = (
        argument
        if function is of_an_argument
        else lambda d: torch.arange(96.0).reshape(8, 12).to(d)
    )
    expected = function(make("cpu"))
    compiled = torch.compile(function, backend="openxla")
    captured = capture(function)
    for call in (function, compiled, torch_xla.compile(function), captured, captured, captured):
        assert torch.equal(call(make("xla")).cpu(), expected)


def test_the_gradient_of_a_compiled_function_with_windows() -> None:
    def loss(weight: torch.Tensor) -> torch.Tensor:
        part = weight.t()
        return part.as_strided((3, 2), (part.stride(0), part.stride(1))).pow(2).sum()

    weight = torch.arange(96.0).reshape(8, 12).requires_grad_()
    on_xla = weight.detach().to("xla").requires_grad_()
    loss(weight).backward()
    torch.compile(loss, backend="openxla")(on_xla).backward()
    assert weight.grad is not None and on_xla.grad is not None
    assert torch.equal(on_xla.grad.cpu(), weight.grad)
