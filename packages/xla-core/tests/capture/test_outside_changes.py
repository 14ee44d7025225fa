"""What a script changes between two replays, outside of a call, has its effect or is refused."""

from __future__ import annotations

import gc
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_xla
from torch_xla.experimental.capture import CaptureError, Graph, capture, graph
from xla_core.recording.entry import Entry
from xla_core.testing.internals import limit_remembered_entries

CALLS, CHANGED_BEFORE = 9, 5
scales = {"forward": 2.0}


class Block(nn.Module):
    factor = 3.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def scaled(self, x):
        return x * self.factor

    def forward(self, x):
        return self.scaled(self.linear(x))


class Trainer:
    best = None

    def __init__(self, optimizer):
        torch.manual_seed(0)
        self.net = nn.Sequential(Block(), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 2)).to("xla")
        self.optimizer = optimizer(self.net.parameters())
        self.block = self.net[0]
        self.weight = self.block.linear.weight

    def report(self):
        return self.best

    def loss(self, y):
        return y.pow(2).sum()

    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.loss(self.net(x))
        loss.backward()
        self.optimizer.step()
        return loss


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.001, momentum=0.9)


def trained(step, trainer, change):
    """The losses of some steps and the parameters after them; ``change`` comes between two steps."""
    losses = []
    for call in range(CALLS):
        if call == CHANGED_BEFORE:
            change(trainer)
        losses.append(step(torch.ones(3, 4).cumsum(0).to("xla")).item())
    return losses, [p.detach().cpu().tolist() for p in trainer.net.parameters()]


def ordinary(optimizer, change, prepare=lambda trainer: None):
    trainer = Trainer(optimizer)
    prepare(trainer)
    return trained(trainer.step, trainer, change)


def assert_refused(optimizer, change, match, prepare=lambda trainer: None):
    """The call after the change is refused, and recorded anew it goes on as ordinary steps do."""
    trainer = Trainer(optimizer)
    prepare(trainer)
    captured, refused = capture(trainer.step), []

    def step(x):
        try:
            return captured(x)
        except CaptureError as error:
            refused.append(str(error))
            with pytest.raises(CaptureError, match=re.escape(str(error))):
                captured(x)  # as long as it has not been reset
            captured.reset()
            return captured(x)

    assert trained(step, trainer, change) == ordinary(optimizer, change, prepare)
    (message,) = refused
    assert match in message


def assert_followed(optimizer, change):
    trainer = Trainer(optimizer)
    captured = capture(trainer.step)
    assert trained(captured, trainer, change) == ordinary(optimizer, change)
    assert captured.recordings == 1


def state_of(trainer):
    return trainer.optimizer.state[trainer.weight]


def replace_state(trainer):
    """The old tensors live on, as in a state_dict() that somebody keeps."""
    (key, *_) = (k for k in state_of(trainer) if k != "step")
    trainer.kept = trainer.optimizer.state_dict()
    state_of(trainer)[key] = torch.zeros(4, 4).to("xla")


STATE = {
    "an entry": replace_state,
    "all": lambda trainer: trainer.optimizer.state.clear(),
    "a parameter's": lambda trainer: trainer.optimizer.state.pop(trainer.weight),
    "a table": lambda trainer: trainer.optimizer.state.update(
        {trainer.weight: {k: v.clone() for k, v in state_of(trainer).items()}}
    ),
}


@pytest.mark.parametrize("optimizer", [adam, sgd])
@pytest.mark.parametrize("change", STATE.values(), ids=STATE)
def test_the_state_of_an_optimizer_is_replaced(optimizer, change):
    assert_refused(optimizer, change, "keeps for its parameters (optimizer.state)")


def test_one_count_of_steps_is_set():
    """Numbers that are computed from it were recorded once for all parameters."""
    assert_refused(adam, lambda trainer: state_of(trainer)["step"].zero_(), "the counts of steps")


def test_all_counts_of_steps_are_set():
    def change(trainer):
        for state in trainer.optimizer.state.values():
            state["step"].zero_()

    assert_followed(adam, change)


FLAGS = {
    "a module": lambda trainer: trainer.block.requires_grad_(False),
    "a parameter": lambda trainer: trainer.weight.requires_grad_(False),
    "an attribute": lambda trainer: setattr(trainer.weight, "requires_grad", False),
    "detached": lambda trainer: trainer.weight.detach_(),
}


@pytest.mark.parametrize("change", FLAGS.values(), ids=FLAGS)
def test_parameters_are_frozen(change):
    assert_refused(adam, change, "net.0.linear.weight.requires_grad was True")


def test_parameters_are_trained_that_were_frozen():
    assert_refused(
        adam,
        lambda trainer: trainer.block.requires_grad_(True),
        "net.0.linear.weight.requires_grad was False",
        prepare=lambda trainer: trainer.block.requires_grad_(False),
    )


def test_a_flag_that_is_set_to_what_it_was_is_followed():
    assert_followed(adam, lambda trainer: trainer.net.requires_grad_(True))


@pytest.mark.parametrize("rounds", [1, 2])
def test_steps_that_freeze_parameters_themselves_leave_them_as_ordinary_steps_do(rounds):
    """As an adversarial training does: what one step sets, the other one finds, and the code after both."""

    def trained(wrap):
        torch.manual_seed(0)
        maker, judge = nn.Linear(4, 4).to("xla"), nn.Linear(4, 1).to("xla")
        of_maker, of_judge = adam(maker.parameters()), adam(judge.parameters())

        def train_judge(x):
            judge.requires_grad_(True)
            of_judge.zero_grad()
            loss = (judge(x) - 1).pow(2).mean() + judge(maker(x).detach()).pow(2).mean()
            loss.backward()
            of_judge.step()
            return loss

        def train_maker(x):
            judge.requires_grad_(False)
            of_maker.zero_grad()
            loss = (judge(maker(x)) - 1).pow(2).mean()
            loss.backward()
            of_maker.step()
            return loss

        steps = [wrap(train_judge)] * rounds + [wrap(train_maker)]
        seen = []
        for call in range(8):
            for step in steps:
                seen.append(step(torch.full((2, 4), float(call)).to("xla")).item())
                seen.append(judge(torch.ones(1, 4).to("xla")).requires_grad)
        return seen

    assert trained(capture) == trained(lambda step: step)


def test_the_state_of_an_optimizer_in_a_block_is_replaced():
    trainer = Trainer(adam)
    x = torch.ones(3, 4).to("xla")
    trainer.step(x)
    with graph(recorded := Graph()):
        trainer.step(x)
    recorded.replay()
    replace_state(trainer)
    with pytest.raises(CaptureError, match=r"optimizer\.state"):
        recorded.replay()


def test_a_parameter_is_swapped():
    def change(trainer):
        torch.utils.swap_tensors(trainer.weight, nn.Parameter(torch.ones(4, 4).to("xla")))

    assert_refused(adam, change, "net.0.linear.weight is no longer the tensor")


def own_forward(trainer):
    linear = trainer.block.linear

    def forward(x):
        return F.linear(x, linear.weight) * scales["forward"]

    linear.forward = forward


FUNCTIONS = {
    "a module of torch's": ("net.0.linear.forward was", own_forward),
    "a method of a module": (
        "net.0.scaled was",
        lambda trainer: setattr(trainer.block, "scaled", torch.neg),
    ),
    "a method": ("self.loss was", lambda trainer: setattr(trainer, "loss", torch.sum)),
    "an optimizer's step": (
        "optimizer.step was",
        lambda trainer: setattr(trainer.optimizer, "step", lambda: None),
    ),
    "a class": (
        "the class of self.net.0 was Block",
        lambda trainer: setattr(
            trainer.block, "__class__", type("Other", (Block,), {"scaled": abs})
        ),
    ),
}


@pytest.mark.parametrize(("match", "change"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_an_object_gets_functions_of_its_own(match, change):
    assert_refused(adam, change, match)


def test_a_class_of_torchs_gets_another_forward(monkeypatch):
    def change(_trainer):
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight))

    trainer = Trainer(adam)
    with pytest.raises(CaptureError, match="forward is no longer the object"):
        trained(capture(trainer.step), trainer, change)


OWN = {
    "what it reads": ("scales['forward'] was 2.0", lambda trainer: scales.update(forward=7.0)),
    "another one": (
        "net.0.linear.forward is no longer",
        lambda trainer: setattr(trainer.block.linear, "forward", torch.neg),
    ),
    "none": (
        "net.0.linear.forward is no longer",
        lambda trainer: delattr(trainer.block.linear, "forward"),
    ),
}


@pytest.mark.parametrize(("match", "change"), OWN.values(), ids=OWN)
def test_a_forward_of_a_modules_own_changes(match, change, monkeypatch):
    def prepare(trainer):
        monkeypatch.setitem(scales, "forward", 2.0)
        own_forward(trainer)

    assert_refused(adam, change, match, prepare)


GROUPS = {
    "another parameter": lambda group, trainer: group["params"].__setitem__(
        0, nn.Parameter(torch.zeros(4, 4).to("xla"))
    ),
    "others": lambda group, trainer: group.update(params=group["params"][2:] * 2),
}


@pytest.mark.parametrize("change", GROUPS.values(), ids=GROUPS)
def test_a_group_gets_other_parameters(change):
    trainer = Trainer(sgd)
    with pytest.raises(CaptureError, match="param_groups of SGD"):
        trained(
            capture(trainer.step), trainer,
            lambda trainer: change(trainer.optimizer.param_groups[0], trainer),
        )  # fmt: skip


FOLLOWED = {
    "a new attribute": lambda trainer: setattr(trainer.block, "note", 3),
    "a value of an object's own": lambda trainer: setattr(trainer, "best", 3),
    "a function that the step does not call": lambda trainer: setattr(trainer, "report", print),
    "a look at the state of a parameter that has none": lambda trainer: trainer.optimizer.state[
        nn.Parameter(torch.ones(1))
    ],
    "a scheduler": lambda trainer: torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1),
    "a list of the same parameters": lambda trainer: trainer.optimizer.param_groups[0].update(
        params=list(trainer.net.parameters())
    ),
    "gradients": lambda trainer: trainer.optimizer.zero_grad(),
}


@pytest.mark.parametrize("change", FOLLOWED.values(), ids=FOLLOWED)
def test_what_changes_nothing_is_no_reason_to_refuse(change):
    assert_followed(adam, change)


def test_another_precision_has_a_recording_of_its_own():
    step = capture(lambda x: x @ x)
    x = torch.ones(2, 2, device="xla")
    for precision in ("default", "highest", "default"):
        torch_xla.backends.set_mat_mul_precision(precision)
        try:
            for _ in range(4):
                step(x)
        finally:
            torch_xla.backends.set_mat_mul_precision("default")
    assert step.recordings == 2


@pytest.mark.parametrize("check_every", [0, 3])
def test_a_device_that_drops_its_steps_changes_nothing(check_every):
    """It does so when they have become many: a check records the step anew then, with a program of its own."""
    x = torch.ones(3, 4).to("xla")
    captured, ordinary = Trainer(adam), Trainer(adam)
    step = capture(captured.step, check_every=check_every)
    losses = [(step(x).item(), ordinary.step(x).item()) for _ in range(CHANGED_BEFORE)]
    former = limit_remembered_entries(0)
    try:
        losses += [(step(x).item(), ordinary.step(x).item()) for _ in range(CALLS)]
    finally:
        limit_remembered_entries(former)
    assert all(mine == wanted for mine, wanted in losses)


@pytest.mark.usefixtures("all_objects")
def test_a_captured_step_holds_none_of_the_steps_that_its_device_drops():
    def entries():
        gc.collect()
        return sum(issubclass(type(one), Entry) for one in gc.get_objects())

    def drop():
        former = limit_remembered_entries(0)
        try:
            torch_xla.sync()
        finally:
            limit_remembered_entries(former)

    x = torch.ones(3, 4).to("xla")
    drop()  # what other tests recorded
    step = capture(lambda x: x * 2 + 1)
    for _ in range(CALLS):
        step(x)
    assert step.recordings == 1
    before = entries()
    for size in range(2, 100):
        # the captured step's input and first operation, and then others
        y = x * 2
        y = y.sum() + torch.zeros(size, device="xla")
        torch_xla.sync()
    assert entries() > before + 100
    drop()
    assert entries() <= before + 1  # the root of the next tree
    assert step(x).tolist() == [[3.0] * 4] * 3
