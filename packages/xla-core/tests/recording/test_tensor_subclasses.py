"""Subclasses of ``torch.Tensor`` on the device, as fastai, MONAI and torchvision have them."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import torch_xla
from torch_xla.experimental.capture import CaptureError, capture


class Tagged(torch.Tensor):
    """A class that says nothing of operators."""

    def doubled(self):
        return self * 2


class Logged(torch.Tensor):
    """A class that sees its operators."""

    seen: list[str] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert cls is Logged and all(issubclass(cls, one) for one in types)
        Logged.seen.append(getattr(func, "__name__", ""))
        return super().__torch_function__(func, types, args, kwargs or {})


class Undecorated(torch.Tensor):
    """A class whose operators return plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl


VALUES = torch.arange(6.0).reshape(2, 3)


def kinds_of_results(cls, device):
    """The values and classes that operations of one tensor give."""
    plain = VALUES.clone().to(device)
    tensor = plain.as_subclass(cls)
    part = tensor[1:]
    tensor.add_(1)
    part.mul_(10)
    tensor[0, 0] = 5
    results = {
        "itself": tensor, "part": part, "sum": tensor.sum(), "with a plain one": plain + tensor,
        "product": tensor @ tensor.t(), "stack": torch.stack([tensor, tensor]), "new": tensor.new_ones(2),
        "moved": VALUES.as_subclass(cls).to(device), "back": tensor.cpu(), "copy": copy.copy(tensor),
        "contiguous": tensor.t().contiguous(),
        "plain": tensor.as_subclass(torch.Tensor), "pickled": pickle.loads(pickle.dumps(tensor)),
    }  # fmt: skip
    if cls is Undecorated:  # on the CPU, both are the tensor itself
        del results["moved"], results["back"]
    return {
        name: (isinstance(value, cls), value.detach().cpu().as_subclass(torch.Tensor).tolist())
        for name, value in results.items()
    }


@pytest.mark.parametrize("cls", [Tagged, Logged, Undecorated])
def test_results_have_the_class_that_they_have_on_the_cpu(cls):
    assert kinds_of_results(cls, "xla") == kinds_of_results(cls, "cpu")


def test_a_class_sees_its_operators_and_keeps_its_methods():
    tensor = VALUES.to("xla").as_subclass(Logged)
    Logged.seen.clear()
    _ = (tensor + 1).relu().tolist()
    assert Logged.seen[:2] == ["add", "relu"] and "tolist" in Logged.seen
    doubled = VALUES.to("xla").as_subclass(Tagged).doubled()
    assert type(doubled).__qualname__ == "Tagged" and doubled.tolist() == (VALUES * 2).tolist()
    assert repr(doubled) == repr(doubled.cpu())[:-1] + ", device='xla:0')"
    assert f"{doubled.sum():.1f}" == "30.0"
    copied = copy.deepcopy([doubled, doubled])
    assert copied[0] is copied[1] and type(copied[0]) is type(doubled)
    assert copied[0].tolist() == doubled.tolist()


def test_gradients_pass():
    leaf = VALUES.to("xla").requires_grad_()
    (leaf.as_subclass(Tagged) * 3).sum().backward()
    assert leaf.grad.tolist() == [[3.0] * 3] * 2
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Tagged))
    layer.to("xla")
    assert isinstance(layer.weight, Tagged) and isinstance(layer.weight, nn.Parameter)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    before = layer.weight.detach().cpu().as_subclass(torch.Tensor)
    layer(VALUES.to("xla")).sum().backward()
    optimizer.step()
    torch_xla.sync()
    assert isinstance(layer.weight, Tagged)
    after = layer.weight.detach().cpu().as_subclass(torch.Tensor)
    torch.testing.assert_close(after, before - 0.5 * VALUES.sum(0))


def test_checkpoints_keep_the_class_and_what_was_set():
    tensor = VALUES.to("xla").as_subclass(Tagged)
    tensor.label = "left"
    file = io.BytesIO()
    torch.save(tensor, file)
    for location in (None, "cpu", "xla"):
        file.seek(0)
        loaded = torch.load(file, weights_only=False, map_location=location)
        assert isinstance(loaded, Tagged) and loaded.label == "left"
        assert loaded.device.type == (location or "xla")
        assert loaded.tolist() == VALUES.tolist()


def test_captured_steps_take_them_and_return_plain_tensors_only():
    tensor = VALUES.to("xla").as_subclass(Tagged)
    step = capture(lambda a: (a * 2).as_subclass(torch.Tensor))
    for _ in range(5):
        assert step(tensor).tolist() == (VALUES * 2).tolist()
    step = capture(lambda a: a * 2)
    with pytest.raises(CaptureError, match=r"of the class Tagged.*as_subclass\(torch.Tensor\)"):
        for _ in range(5):
            step(tensor)


def test_what_cannot_be_says_why():
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError

    class OtherType(type(torch.Tensor)):
        pass

    class Other(torch.Tensor, metaclass=OtherType):
        pass

    with pytest.raises(TypeError, match=r"cannot be a .*Wrapper: .*__torch_dispatch__"):
        VALUES.to("xla").as_subclass(Wrapper)
    with pytest.raises(TypeError, match=r"cannot be a .*Other: metaclass conflict"):
        VALUES.to("xla").as_subclass(Other)


def test_the_class_makes_what_the_users_class_makes():
    kind = type(torch.ones(2).as_subclass(Tagged).to("xla"))
    made = kind([1.0, 2.0])
    assert type(made) is Tagged
    assert made.doubled().tolist() == [2.0, 4.0]
    assert type(kind(torch.ones(3))) is Tagged
