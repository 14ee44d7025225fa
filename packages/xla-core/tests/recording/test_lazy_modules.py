"""Lazy modules of torch on ``xla``: what they do there is what they do on the CPU."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

import torch_xla  # noqa: F401 - it attaches the device

IMAGES = torch.arange(96.0).reshape(2, 3, 4, 4).sin()
ROWS = torch.arange(8.0).reshape(2, 4).cos()
MODULES: list[tuple[Callable[[], nn.Module], torch.Tensor]] = [
    (lambda: nn.LazyLinear(3), ROWS),
    (lambda: nn.LazyConv2d(3, 2), IMAGES),
    (lambda: nn.LazyConvTranspose2d(3, 2), IMAGES),
    (lambda: nn.LazyBatchNorm2d(), IMAGES),
    (lambda: nn.LazyInstanceNorm2d(affine=True, track_running_stats=True), IMAGES),
    (lambda: nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyLinear(2)), ROWS),
]


@pytest.mark.parametrize(("make", "x"), MODULES)
def test_a_lazy_module_is_moved_before_its_first_use(
    make: Callable[[], nn.Module], x: torch.Tensor
) -> None:
    on_cpu, on_xla = make(), make().to("xla")
    on_cpu(x)
    assert on_xla(x.to("xla")).device.type == "xla"
    assert type(on_xla) is type(on_cpu)  # LazyLinear has become Linear
    on_xla.load_state_dict(on_cpu.state_dict())
    expected, found = on_cpu(x), on_xla(x.to("xla"))
    torch.testing.assert_close(found.cpu(), expected)
    expected.sum().backward()
    found.sum().backward()
    pairs = zip(on_cpu.parameters(), on_xla.parameters(), strict=True)
    for wanted, parameter in pairs:
        assert isinstance(parameter, nn.Parameter) and parameter.device.type == "xla"
        assert wanted.grad is not None and parameter.grad is not None
        # gradients of a normalized sum are differences of nearly equal numbers
        torch.testing.assert_close(parameter.grad.cpu(), wanted.grad, atol=1e-4, rtol=1e-4)


MADE_THERE: list[tuple[Callable[[], nn.Module], torch.Tensor]] = [
    (lambda: nn.LazyLinear(3, device="xla"), ROWS),
    (lambda: nn.LazyConv2d(3, 2, device="xla"), IMAGES),
    (lambda: nn.LazyBatchNorm2d(device="xla"), IMAGES),
]


@pytest.mark.parametrize(("make", "x"), MADE_THERE)
def test_a_lazy_module_is_made_on_the_device(
    make: Callable[[], nn.Module], x: torch.Tensor
) -> None:
    module = make()
    assert all(nn.parameter.is_lazy(p) and p.device.type == "xla" for p in module.parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    found = module(x.to("xla"))
    twin = copy.deepcopy(module).cpu()
    wanted = twin(x)
    if not isinstance(module, nn.BatchNorm2d):  # whose running statistics have been updated
        torch.testing.assert_close(found.detach().cpu(), wanted.detach())
    found.sum().backward()
    wanted.sum().backward()
    optimizer.step()
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        assert isinstance(p, nn.Parameter) and q.grad is not None
        torch.testing.assert_close(
            p.detach().cpu(), q.detach() - 0.5 * q.grad, atol=1e-4, rtol=1e-4
        )
    assert dict(module.named_buffers()).keys() == dict(twin.named_buffers()).keys()


def test_uninitialized_tensors_are_made_with_torchs_own_arguments() -> None:
    buffer = nn.UninitializedBuffer(False, "xla", torch.float64, False)
    assert buffer.dtype is torch.float64 and not buffer.persistent and not buffer.requires_grad
    with torch.device("xla"):
        parameter = nn.UninitializedParameter(requires_grad=False)
    assert isinstance(parameter, nn.Parameter) and not parameter.requires_grad
    assert type(nn.UninitializedParameter(dtype=torch.float64)) is nn.UninitializedParameter


def test_a_lazy_module_takes_a_saved_state_before_its_first_use() -> None:
    state = nn.Linear(4, 3).state_dict()
    module = nn.LazyLinear(3).to("xla")
    module.load_state_dict(state)
    assert torch.equal(module.weight.cpu(), state["weight"])
    assert module(ROWS.to("xla")).shape == (2, 3) and module.in_features == 4


def test_a_state_without_values_is_refused_by_a_module_that_has_them() -> None:
    state = nn.LazyLinear(3).to("xla").state_dict()
    with pytest.raises(RuntimeError, match="shape of an uninitialized parameter"):
        nn.Linear(4, 3).to("xla").load_state_dict(state)


def test_moving_twice_casting_and_copying_keep_a_module_lazy() -> None:
    for module in (
        nn.LazyLinear(3).to("xla").to("xla").double(),
        nn.LazyLinear(3).to("xla", torch.float64),
        copy.deepcopy(nn.LazyLinear(3).double().to("xla")),
    ):
        assert module(ROWS.double().to("xla")).dtype is torch.float64
        assert module.weight.shape == (3, 4) and module.weight.device.type == "xla"


def test_an_optimizer_made_before_the_first_use_trains() -> None:
    module = nn.LazyLinear(1, bias=False).to("xla")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    module(ROWS.to("xla")).sum().backward()
    before = module.weight.detach().cpu()
    optimizer.step()
    torch.testing.assert_close(module.weight.cpu(), before - 0.5 * ROWS.sum(0))


def test_a_lazy_state_is_saved_as_torchs_own_classes() -> None:
    file = io.BytesIO()
    torch.save(nn.LazyBatchNorm1d().to("xla").state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)  # torch's list of safe classes lacks both
    assert type(loaded["weight"]) is nn.UninitializedParameter
    assert type(loaded["running_mean"]) is nn.UninitializedBuffer


def test_errors_before_the_first_use() -> None:
    module = nn.LazyLinear(3).to("xla")
    with pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        module.weight + 1
    with pytest.raises(RuntimeError, match="cannot be moved from xla:0 to cpu"):
        module.to("cpu")
