"""Numbers and tensors of the host that a step reads are constants of its recording: changing one is noticed."""

from __future__ import annotations

import argparse
import collections
import cProfile
import dataclasses
import functools
import importlib
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_xla.experimental.capture import CaptureError, capture

LIBRARY = """
class Config:
    pass


class Scaler:
    factor = 2.0

    def __call__(self, x):
        return x * self.factor


scale = 2.0
config = Config()
config.scale = 2.0
scaler = Scaler()


def scaled(x):
    return x * scale
"""


@pytest.fixture
def library(monkeypatch, tmp_path):
    """A module of the user's that a step imports."""
    (tmp_path / "library_of_a_user.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("library_of_a_user")
    del sys.modules["library_of_a_user"]


def recorded(function):
    """``function``, captured and replayed."""
    step = capture(function)
    for _ in range(4):
        result = step(torch.ones(2, device="xla"))
    assert step.recordings == 1
    assert result.tolist() == [2.0, 2.0]
    return step


def noticed(step, change):
    """The error of ``step`` after ``change``, and what it gives once it is recorded anew."""
    change(3.0)
    with pytest.raises(CaptureError, match=r"was|has changed|is no longer the object") as told:
        step(torch.ones(2, device="xla"))
    step.reset()
    assert step(torch.ones(2, device="xla")).tolist() == [3.0, 3.0]
    return str(told.value)


class Plain:
    scale = 2.0

    def step(self, x):
        return x * self.scale


class Slots:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 2.0


@dataclasses.dataclass
class Data:
    scale: float = 2.0


@dataclasses.dataclass(slots=True)
class DataSlots:
    scale: float = 2.0


class Properties:
    def __init__(self):
        self.inner = 2.0

    @property
    def scale(self):
        return self.inner

    @functools.cached_property
    def cached(self):
        return self.inner


class Derived(dict):
    pass


class Loss(nn.Module):
    weight = 2.0

    def forward(self, x):
        return x * self.weight


def attribute(owner, name="scale"):
    return lambda value: setattr(owner, name, value)


def kinds_of_objects():
    data, slots, data_slots, properties = Data(), Slots(), DataSlots(), Properties()
    space, options = types.SimpleNamespace(scale=2.0), argparse.Namespace(scale=2.0)
    table, nested, derived = {"scale": 2.0}, {"a": {"b": 2.0}}, Derived(scale=2.0)
    items, queue = [2.0], collections.deque([2.0])
    part = functools.partial(lambda data, x: x * data.scale, data)
    array, scalar = np.array([2.0]), torch.tensor(2.0)
    pair = (scalar, 1)
    plain = type("Plain", (Plain,), {})
    loss = type("Loss", (Loss,), {})
    static = type("Static", (), {"scale": 2.0, "of": staticmethod(lambda x: x * static.scale)})
    of_class = type("OfClass", (), {"scale": 2.0, "of": classmethod(lambda cls, x: x * cls.scale)})
    return {
        "an attribute of a class": (plain().step, attribute(plain)),
        "slots": (lambda x: x * slots.scale, attribute(slots)),
        "a data class": (lambda x: x * data.scale, attribute(data)),
        "a data class with slots": (lambda x: x * data_slots.scale, attribute(data_slots)),
        "a namespace": (lambda x: x * space.scale, attribute(space)),
        "parsed options": (lambda x: x * options.scale, attribute(options)),
        "a property": (lambda x: x * properties.scale, attribute(properties, "inner")),
        "a dictionary": (lambda x: x * table["scale"], lambda v: table.update(scale=v)),
        "a nested dictionary": (lambda x: x * nested["a"]["b"], lambda v: nested["a"].update(b=v)),
        "a subclass of dict": (lambda x: x * derived["scale"], lambda v: derived.update(scale=v)),
        "a list": (lambda x: x * items[0], lambda v: items.__setitem__(0, v)),
        "a deque": (lambda x: x * queue[0], lambda v: queue.__setitem__(0, v)),
        "a partial": (lambda x: part(x), attribute(data)),
        "a static method": (lambda x: static.of(x), attribute(static)),
        "a class method": (lambda x: of_class.of(x), attribute(of_class)),
        "an attribute of a module's class": (loss(), attribute(loss, "weight")),
        "a default of a keyword": (lambda x, *, data=data: x * data.scale, attribute(data)),
        "getattr": (lambda x: x * getattr(data, "scale"), attribute(data)),  # noqa: B009
        "an array": (lambda x: x * float(array[0]), lambda v: array.fill(v)),
        "a tensor": (lambda x: x * scalar, lambda v: scalar.fill_(v)),
        "a tensor in a tuple": (lambda x: x * pair[0], lambda v: scalar.fill_(v)),
    }


@pytest.mark.parametrize("kind", kinds_of_objects())
def test_a_number_in(kind):
    function, change = kinds_of_objects()[kind]
    noticed(recorded(function), change)


IN_A_MODULE = {
    "a number": (lambda lib, x: x * lib.scale, lambda lib: attribute(lib)),
    "a global of its function": (lambda lib, x: lib.scaled(x), lambda lib: attribute(lib)),
    "an object": (lambda lib, x: x * lib.config.scale, lambda lib: attribute(lib.config)),
    "a callable": (lambda lib, x: lib.scaler(x), lambda lib: attribute(lib.scaler, "factor")),
    "a class of it": (lambda lib, x: lib.scaler(x), lambda lib: attribute(lib.Scaler, "factor")),
}


@pytest.mark.parametrize("kind", IN_A_MODULE)
def test_a_number_behind_a_module_of_the_user(library, kind):
    function, change = IN_A_MODULE[kind]
    noticed(recorded(lambda x: function(library, x)), change(library))


def twice(x):
    return x * 2


def thrice(x):
    return x * 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.options, self.activation = Data(), twice

    def forward(self, x):
        return self.activation(x) * self.options.scale / 2


def places_of_objects():
    data, table, items = Data(), {"f": twice, "data": Data()}, [Data()]
    holder = types.SimpleNamespace(data=data)
    layer, layer_2 = Layer(), Layer()
    kind = type("Kind", (), {"of": staticmethod(twice), "data": data})

    def rebind(value):
        nonlocal data
        data = Data(value)

    return {
        "a closure": (lambda x: x * data.scale, rebind),
        "an attribute": (
            lambda x: x * holder.data.scale,
            lambda v: setattr(holder, "data", Data(v)),
        ),
        "a dictionary": (lambda x: x * table["data"].scale, lambda v: table.update(data=Data(v))),
        "a list": (lambda x: x * items[0].scale, lambda v: items.__setitem__(0, Data(v))),
        "a module": (layer, lambda v: setattr(layer, "options", Data(v))),
        "a class": (lambda x: x * kind.data.scale, lambda v: setattr(kind, "data", Data(v))),
        "a function in a dictionary": (lambda x: table["f"](x), lambda v: table.update(f=thrice)),
        "a function of a module": (layer_2, lambda v: setattr(layer_2, "activation", thrice)),
        "a method of a class": (
            lambda x: kind.of(x),
            lambda v: setattr(kind, "of", staticmethod(thrice)),
        ),
    }


@pytest.mark.parametrize("place", places_of_objects())
def test_another_object_in(place):
    function, change = places_of_objects()[place]
    assert "is no longer the object" in noticed(recorded(function), change)


def test_a_list_that_became_shorter():
    items = [2.0, 5.0]
    step = recorded(lambda x: x * items[0])
    del items[1]
    with pytest.raises(CaptureError, match=r"items\[1\]"):
        step(torch.ones(2, device="xla"))


def test_an_attribute_of_its_own_hides_that_of_the_class():
    plain = type("Plain", (Plain,), {})()
    noticed(recorded(plain.step), attribute(plain))


def test_a_named_attribute_beside_more_objects_than_are_looked_at():
    class Trainer:
        def __init__(self):
            self.samples = [[i] for i in range(30_000)]
            self.options = Data()

        def step(self, x):
            return x * self.options.scale

    trainer = Trainer()
    noticed(recorded(trainer.step), attribute(trainer.options))


def test_what_no_code_names_may_change():
    class Trainer:
        def __init__(self):
            self.epoch = 0
            self.samples = [1, 2]
            self.last = {"loss": torch.ones(2, device="xla"), "step": 0}

        def step(self, x):
            return x * 2

    trainer = Trainer()
    step = recorded(trainer.step)
    trainer.samples[0] = 5
    trainer.last.update(loss=torch.ones(2, device="xla"), step=1)
    trainer.epoch, trainer.samples, Trainer.other = 1, [3], 4
    assert step(torch.ones(2, device="xla")).tolist() == [2.0, 2.0]
    assert step.recordings == 1


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, which it does not initialize, as accelerate's is."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()


def test_a_wrapper_of_an_optimizer():
    def losses(captured):
        torch.manual_seed(0)
        net = nn.Linear(2, 1).to("xla")
        optimizer = Wrapper(torch.optim.Adam(net.parameters(), lr=0.1))

        def step(x):
            optimizer.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = capture(step) if captured else step
        values = []
        for i in range(8):
            optimizer.optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            values.append(step(torch.ones(2, device="xla")).item())
        return values

    assert losses(captured=True) == losses(captured=False)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * current_options().scale


OPTIONS = Data()


def current_options():
    return OPTIONS


def hooked(x):
    x.register_hook(lambda grad: grad * current_options().scale)
    return x * 1


def scaled(grad):
    return grad * current_options().scale


def with_a_function(x):
    x.register_hook(scaled)
    return x * 1


def checkpointed(x):
    return checkpoint(lambda x: x * OPTIONS.scale, x, use_reentrant=True)


@pytest.mark.parametrize("function", [Scaled.apply, hooked, with_a_function, checkpointed])
def test_a_number_that_another_thread_reads(function):
    def step(x):
        x = (x * 1).detach().requires_grad_()
        return torch.autograd.backward(function(x).sum()) or x.grad * 1

    try:
        noticed(recorded(step), attribute(OPTIONS))
    finally:
        OPTIONS.scale = 2.0


def test_code_that_did_not_run_may_name_what_changes():
    options = types.SimpleNamespace(report=False, count=0)

    def report():
        options.count += 1

    def step(x):
        if options.report:
            report()
        return x * 2

    step = recorded(step)
    options.count = 5
    assert step(torch.ones(2, device="xla")).tolist() == [2.0, 2.0]
    options.report = True
    with pytest.raises(CaptureError, match="report"):
        step(torch.ones(2, device="xla"))


def test_a_captured_step_inside_another_one():
    data = Data()
    inner = capture(lambda x: x * data.scale)
    outer = recorded(lambda x: inner(x) * 1)
    assert sys.getprofile() is None
    noticed(outer, attribute(data))


def test_nothing_stays_after_a_call_that_is_interrupted():
    def step(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(step)(torch.ones(2, device="xla"))
    assert sys.getprofile() is None


def test_beside_a_profiler():
    data = Data()
    profiler = cProfile.Profile()
    profiler.enable()
    own = sys.getprofile()  # None from Python 3.12 on
    try:
        step = recorded(lambda x: x * data.scale)
        assert sys.getprofile() is own
    finally:
        profiler.disable()
    assert sys.getprofile() is None
    noticed(step, attribute(data))


HOST_TENSORS = {
    "operand": lambda x, t: x * t,
    "item": lambda x, t: x * t.item(),
    "float": lambda x, t: x * float(t),
    "copied to the device": lambda x, t: x * t.to("xla"),
}


@pytest.mark.parametrize("how", HOST_TENSORS)
def test_a_tensor_of_the_host_that_is_written_to(how):
    tensor = torch.tensor(2.0)
    step = recorded(lambda x: HOST_TENSORS[how](x, tensor))
    tensor.fill_(2.0)  # the same value is no change
    assert step(torch.ones(2, device="xla")).tolist() == [2.0, 2.0]
    assert "tensor, which is on the host, has changed" in noticed(step, tensor.fill_)


class OnHost(nn.Module):
    def __init__(self, as_parameter):
        super().__init__()
        if as_parameter:
            self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        else:
            self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize("as_parameter", [True, False])
def test_a_tensor_of_a_module_on_the_host_that_is_written_to(as_parameter):
    module = OnHost(as_parameter)
    assert "module.scale, which is on the host" in noticed(
        recorded(lambda x: module(x)), module.scale.fill_
    )


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        self.count.add_(1)
        return x * 2


def steps_that_write():
    count, array, seen, module = torch.tensor(0), np.zeros(2), set(), Counting()
    return {
        "a tensor": lambda x: (x * 2, count.add_(1))[0],
        "a buffer": module,
        "an array": lambda x: (x * 2, np.add(array, 1, out=array))[0],
        "a set": lambda x: (x * 2, seen.add(len(seen)))[0],
    }


@pytest.mark.parametrize("what", steps_that_write())
def test_a_step_that_writes_to_the_host(what):
    step = capture(steps_that_write()[what])
    with pytest.raises(CaptureError, match=r"the step (writes to|changes) .*a replay would not"):
        for _ in range(4):
            step(torch.ones(2, device="xla"))


def test_a_large_tensor_of_the_host_that_is_written_to():
    tensor = torch.full((20_000,), 2.0)
    step = recorded(lambda x: x * tensor[:2].to("xla"))
    noticed(step, tensor.fill_)


def test_more_objects_than_can_be_watched(monkeypatch):
    monkeypatch.setattr("xla_core.capture.reachable._MOST", 1_000)
    table = [[float(i)] for i in range(2_000)]
    step = capture(lambda x: x * table[2][0])
    with pytest.raises(CaptureError, match="more than 1000 objects"):
        for _ in range(4):
            step(torch.ones(2, device="xla"))
