"""What a captured step cannot do is refused, with the reason and the line; never replayed wrongly."""

from __future__ import annotations

import contextvars

import pytest
import torch
from torch import nn

import torch_xla
from torch_xla.experimental.capture import CaptureError, capture
from xla_core.execution import step_closures


def model(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 2)).to("xla")


def ones(*shape):
    return torch.ones(*shape, device="xla")


def line_of(function, offset):
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno + offset}"


def refused(step, *calls, match):
    """The error of the first of ``calls`` (tuples of arguments) that is refused."""
    with pytest.raises(CaptureError, match=match) as told:
        for args in calls:
            step(*args)
    return str(told.value)


def replayed(step, *args):
    """``step``, called until it is replayed."""
    for _ in range(4):
        step(*args)
    assert step.recordings == 1
    return step


READS = {
    "item": lambda y: y.sum().item(),
    "print": lambda y: print(y),  # noqa: T201 - what a user writes
    "cpu": lambda y: y.cpu(),
    "condition": lambda y: bool(y.sum() > 0),
    "sync": lambda y: torch_xla.sync(),
    "numpy": lambda y: y.numpy(force=True),
}


@pytest.mark.parametrize("how", READS)
def test_a_value_that_is_read_inside(how):
    def step(x):
        y = x + 1
        READS[how](y)
        return y

    told = refused(capture(step), *[(ones(2),)] * 3, match="reads a value")
    assert "test_refusals.py" in told


def test_a_value_that_was_there_before_is_read_inside():
    flag = ones(1)
    torch_xla.sync()
    step = capture(lambda x: x + 1 if flag.item() else x)
    refused(step, *[(ones(2),)] * 3, match="reads a value")


def test_a_read_whose_error_is_caught():
    def step(x):
        try:
            return x * x.sum().item()
        except RuntimeError:
            return x

    refused(capture(step), *[(ones(2),)] * 3, match="reads a value")


def test_a_compiled_graph_inside():
    compiled = torch.compile(lambda x: x.sin() + 1, backend="openxla")
    compiled(ones(2))
    refused(
        capture(lambda x: compiled(x) * 2),
        *[(ones(2),)] * 3,
        match="calls a program that was compiled",
    )


def test_an_argument_that_gets_a_gradient():
    def step(x):
        (x * x).sum().backward()

    inputs = [(ones(2).requires_grad_(),) for _ in range(4)]
    refused(capture(step), *inputs, match="sets the gradient of an argument")


def test_a_result_with_a_gradient():
    def step(x):
        y = x.detach().requires_grad_()
        (y * y).sum().backward()
        return y

    refused(capture(step), *[(ones(2),)] * 4, match=r"returns a tensor of .* and gave a gradient")


@pytest.mark.filterwarnings("error")
def test_an_argument_that_is_no_leaf_after_the_step():
    step = capture(lambda x, y: x.add_(y))
    y = ones(2).requires_grad_()
    for _ in range(5):
        assert step(ones(2), y).tolist() == [2, 2]


def test_after_a_refused_read_the_device_goes_on():
    step = capture(lambda x: x * x.sum().item())
    refused(step, *[(ones(2),)] * 3, match="reads a value")
    assert (ones(2) * 3).sum().item() == 6


def test_a_number_that_changes_from_call_to_call():
    count = iter(range(2, 100))

    def step(x):
        return x.acosh() * float(next(count))

    told = refused(capture(step), *[(ones(2),)] * 4, match="Pass the number as a tensor")
    assert line_of(step, 1) in told
    assert "was 4.0 in one call and is 5.0 in the next" in told


def test_a_number_that_the_function_looks_at_and_that_changes_later():
    factor = 2.0

    def step(x):
        return x * factor

    captured = replayed(capture(step), ones(2))
    factor = 3.0
    refused(captured, (ones(2),), match=r"factor was 2.0 .* and is now 3.0")
    captured.reset()
    assert captured(ones(2)).tolist() == [3, 3]


def test_an_attribute_that_changes_later():
    class Trainer:
        def __init__(self):
            self.scale, self.epoch = 2.0, 0

        def step(self, x):
            return x * self.scale

    trainer = Trainer()
    step = replayed(capture(trainer.step), ones(2))
    trainer.epoch += 1  # no code of the step names it
    assert step(ones(2)).tolist() == [2, 2]
    trainer.scale = 4.0
    refused(step, (ones(2),), match=r"scale was 2.0 .* and is now 4.0")


def test_a_program_that_changes_from_call_to_call():
    count = iter(range(100))

    def step(x):
        return x + 1 if next(count) % 2 else x.sin()

    told = refused(capture(step), *[(ones(2),)] * 4, match="recorded different programs")
    assert "aten.sin" in told
    assert "aten.add" in told


def test_a_module_switched_to_evaluation():
    net = model(nn.Dropout(0.5))
    step = replayed(capture(lambda x: net(x)), ones(2, 3))
    net.eval()
    refused(step, (ones(2, 3),), match=r"training was True .* and is now False")
    net.train()
    step(ones(2, 3))


def test_a_dropout_with_another_probability():
    net = model(nn.Dropout(0.5))
    step = replayed(capture(lambda x: net(x)), ones(2, 3))
    net[1].p = 0.25
    refused(step, (ones(2, 3),), match=r"p was 0.5 .* and is now 0.25")


@pytest.mark.parametrize("kind", ["forward", "parameter", "everywhere"])
def test_hooks_that_were_added_since(kind):
    net = model()
    step = replayed(capture(lambda x: net(x)), ones(2, 3))
    if kind == "forward":
        handle = net[0].register_forward_hook(lambda *_: None)
    elif kind == "parameter":
        handle = net[0].weight.register_hook(lambda _: None)
    else:
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        refused(step, (ones(2, 3),), match="has other hooks")
    finally:
        handle.remove()
    step(ones(2, 3))


def test_a_parameter_that_was_added_since():
    net = model()
    step = replayed(capture(lambda x: net(x)), ones(2, 3))
    net[0].register_parameter("more", nn.Parameter(ones(1)))
    refused(step, (ones(2, 3),), match="more")


class Two(nn.Module):
    def forward(self, x):
        return self.a(x) + self.b(x)


CHANGES = [
    ("net.c was .* and is now a ReLU", lambda net: net.add_module("c", nn.ReLU())),
    (r"net._modules\['b'\] .*\(Sequential\)", lambda net: net._modules.pop("b")),
    (r"_modules\['a'\] .*\(Sequential\)", lambda net: net._modules.update(a=net.b, b=net.a)),
    ("net.a.2 was .* and is now a ReLU", lambda net: net.a.append(nn.ReLU())),
    ("net.b._modules is no longer", lambda net: net.b.pop(1)),
]


@pytest.mark.parametrize(("match", "change"), CHANGES)
def test_a_module_whose_parts_have_changed(match, change):
    net = Two()
    net.a, net.b = model(), model()
    step = replayed(capture(lambda x: net(x)), ones(2, 3))
    change(net)
    for _ in range(2):
        refused(step, (ones(2, 3),), match=match)


@pytest.mark.parametrize("how", ["data", "attribute", "dictionary"])
def test_a_parameter_that_was_replaced(how):
    net = model()
    step = replayed(capture(lambda x: net(x)), ones(2, 3))
    old = net[0].weight  # whoever keeps it, the module has another one
    other = nn.Parameter(ones(4, 3))
    if how == "data":
        kept = old.data
        old.data = other.data
        assert kept is not None
    elif how == "attribute":
        net[0].weight = other
    else:
        net[0]._parameters["weight"] = other
    refused(step, (ones(2, 3),), match=r"0\.weight is no longer the tensor")


def test_a_tensor_of_a_closure_that_was_replaced():
    offset = ones(2)
    step = replayed(capture(lambda x: x + offset), ones(2))
    offset = ones(2) * 5
    refused(step, (ones(2),), match="offset is no longer the tensor")


def test_a_tensor_that_was_replaced_where_capture_does_not_look():
    hidden = contextvars.ContextVar("hidden")
    hidden.set(ones(2))
    step = replayed(capture(lambda x: x + hidden.get()), ones(2))
    hidden.set(ones(2) * 5)
    refused(step, (ones(2),), match="is no longer the tensor")


def test_state_that_was_loaded_into_an_optimizer():
    net = model()
    optimizer = torch.optim.Adam(net.parameters())

    def train(x):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    step = replayed(capture(train), ones(2, 3))
    optimizer.load_state_dict(optimizer.state_dict())
    refused(step, (ones(2, 3),), match="the state of Adam is no longer")
    step.reset()
    replayed(step, ones(2, 3))


def test_a_tensor_that_is_replaced_in_every_call():
    hidden = ones(2)

    def step(x):
        nonlocal hidden
        hidden = hidden + x

    refused(capture(step), *[(ones(2),)] * 4, match=r"sets hidden to another tensor")


def test_results_that_are_kept_in_a_list():
    history = []
    step = capture(lambda x: history.append(x + 1))
    refused(step, *[(ones(2),)] * 4, match="history")


def test_a_counter():
    calls = 0

    def step(x):
        nonlocal calls
        calls += 1
        return x + 1

    refused(capture(step), *[(ones(2),)] * 2, match=r"changes calls from 1 to 2")


def test_a_counter_of_a_module():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x + 1

    net = Counting()
    refused(capture(net), *[(ones(2),)] * 2, match="calls")


def test_printing(capsys):
    def step(x):
        print("step")  # noqa: T201 - what a user writes
        return x + 1

    told = refused(capture(step), *[(ones(2),)] * 2, match="the step prints")
    assert line_of(step, 1) in told
    assert capsys.readouterr().out == "step\n" * 2


def test_a_step_closure():
    def step(x):
        step_closures.add(x.device, lambda: None)
        return x + 1

    try:
        refused(capture(step), *[(ones(2),)] * 2, match="step closure")
    finally:
        step_closures.run(torch.device("xla:0"))


@pytest.mark.parametrize("how", ["seed", "generator"])
def test_random_state_that_is_set_inside(how):
    generator = torch.Generator(device="xla")

    def step(x):
        if how == "seed":
            torch_xla.manual_seed(3)
            return x + torch.rand_like(x)
        return x + torch.rand(2, device="xla", generator=generator)

    refused(capture(step), *[(ones(2),)] * 4, match="random state")


def test_values_of_the_host_that_differ():
    numbers = iter(range(100))

    def step(x):
        return x + torch.tensor([float(next(numbers)), 1.0], device="xla")

    told = refused(capture(step), *[(ones(2),)] * 4, match="copies a tensor of .* from the host")
    assert line_of(step, 1) in told


def test_a_value_of_the_host_copied_into_a_tensor():
    place = ones(2)

    def step(x):
        place.copy_(torch.zeros(2))
        return x + 1

    told = refused(capture(step), *[(ones(2),)] * 4, match="from the host to the device")
    assert line_of(step, 1) in told


def test_results_that_are_numbers_which_change():
    numbers = iter(range(100))
    step = capture(lambda x: (x + 1, next(numbers)))
    refused(step, *[(ones(2),)] * 4, match="differs from call to call")


def test_arguments_that_share_memory():
    step = replayed(capture(lambda x, y: (x + y, x.mul_(2))), ones(2), ones(2))
    same = ones(2)
    refused(step, (same, same), match="share memory")


class Halving(torch.optim.Optimizer):
    """An optimizer of the user's own, whose rate is another one in each step."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        group["lr"] /= 2
        for p in group["params"]:
            p.add_(p.grad, alpha=-group["lr"])


def test_an_optimizer_that_cannot_be_followed():
    net = model()
    optimizer = Halving(net.parameters())

    def train(x):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    refused(capture(train), *[(ones(2, 3),)] * 4, match="Halving changes 'lr' in its step")


def test_an_optimizer_that_decides_by_the_number_of_steps():
    net = model()
    optimizer = torch.optim.RAdam(net.parameters())

    def train(x):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    refused(capture(train), *[(ones(2, 3),)] * 4, match="capturable=True")


@pytest.mark.parametrize("key", ["momentum", "weight_decay"])
def test_a_constant_of_an_optimizer_that_changes(key):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.0, weight_decay=0.0)

    def train(x):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    step = replayed(capture(train), ones(2, 3))
    optimizer.param_groups[0][key] = 0.5
    refused(step, (ones(2, 3),), match=f"{key} of SGD was 0.0 .* and is now 0.5")


def test_a_parameter_group_that_was_added():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train(x):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    step = replayed(capture(train), ones(2, 3))
    optimizer.add_param_group({"params": [nn.Parameter(ones(1))]})
    refused(step, (ones(2, 3),), match="param_groups of SGD")


def test_too_many_kinds_of_arguments():
    step = capture(lambda x, factor: x * factor, max_recordings=3)
    refused(step, *[(ones(2), i) for i in range(2, 9)], match="3 recordings have been made")


def test_a_step_that_computes_nothing():
    refused(capture(lambda x: None), *[(ones(2),)] * 2, match="computes nothing")


@pytest.mark.parametrize("option", ["warmup", "check_every", "max_recordings"])
def test_options_that_are_no_numbers(option):
    with pytest.raises(ValueError, match=option):
        capture(lambda x: x, **{option: -1})
