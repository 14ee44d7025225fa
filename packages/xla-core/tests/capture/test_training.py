"""Captured training steps: bit-equal to ordinary ones, with all that changes from step to step."""

from __future__ import annotations

import copy
import gc
import io
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torch_xla
from torch_xla.amp import syncfree
from torch_xla.experimental.capture import CaptureError, capture
from xla_core.execution import runtime
from xla_core.recording import random_state
from xla_core.support import counters

DEVICE = "xla"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.drop(F.relu(self.norm(self.first(x)))))


def batches(count, sizes=(8,)):
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator))
        for size in itertools.islice(itertools.cycle(sizes), count)
    ]


class Run:
    """One training: its parts, and a step of it."""

    def __init__(self, make_optimizer, make_schedule=None, clip=None, scaler=False, net=Net):
        torch.manual_seed(0)
        torch_xla.manual_seed(0)
        self.net = net().to(DEVICE)
        self.optimizer = make_optimizer(self.net.parameters())
        self.schedule = make_schedule(self.optimizer) if make_schedule else None
        self.scaler = (
            torch.amp.GradScaler("xla", init_scale=4.0, growth_interval=3) if scaler else None
        )
        self.clip = clip

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.net(x), y)
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
            self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        return loss

    def train(self, data, captured, **options):
        step = capture(self.step, **options) if captured else self.step
        losses = []
        for x, y in data:
            losses.append(step(x.to(DEVICE), y.to(DEVICE)).detach())
            torch_xla.sync()
        if captured:
            self.captured = step
        return torch.stack(losses).tolist()

    def state(self):
        state = {f"net.{k}": v.cpu() for k, v in self.net.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            for key, value in values.items():
                state[f"{number}.{key}"] = torch.as_tensor(value).cpu()
        for name, p in self.net.named_parameters():
            state[f"grad.{name}"] = p.grad.cpu()
        state["lr"] = torch.tensor([float(g["lr"]) for g in self.optimizer.param_groups])
        if self.scaler is not None:
            state["scale"] = torch.tensor(self.scaler.get_scale())
        return state


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def check_alike(*args, steps=12, sizes=(8,), **kwargs):
    """A captured training equals the ordinary one to the last bit, in all that it leaves behind."""
    data = batches(steps, sizes)
    lazy, captured = Run(*args, **kwargs), Run(*args, **kwargs)
    torch_xla.manual_seed(1)
    expected = lazy.train(data, False)
    state = lazy.state()
    torch_xla.manual_seed(1)
    assert captured.train(data, True) == expected
    assert_same(captured.state(), state)
    assert captured.captured.recordings == len(set(sizes))
    return captured


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, nesterov=True, dampening=0),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adam one by one": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=1e-2),
    "adam fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "adam capturable": lambda p: torch.optim.Adam(p, lr=1e-2, capturable=True),
    "adam with a tensor": lambda p: torch.optim.Adam(
        p, lr=torch.tensor(1e-2, device=DEVICE), capturable=True
    ),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "radam capturable": lambda p: torch.optim.RAdam(p, capturable=True),
    "nadam capturable": lambda p: torch.optim.NAdam(p, capturable=True),
    "syncfree adam": lambda p: syncfree.Adam(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    check_alike(OPTIMIZERS[name])


SCHEDULES = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=20),
    "steps": lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=5, gamma=0.5),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=40),
    "in a row": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, total_iters=6),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        milestones=[6],
    ),
}


# A new tensor each time; a rate that the step does not read.
NOT_SCHEDULED = {"adam with a tensor", "rprop"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_batches_of_two_sizes(name):
    """Each size has a recording of its own; the optimizer's state and counts of steps are those of all."""
    schedule = None if name in NOT_SCHEDULED else SCHEDULES["lambda"]
    check_alike(OPTIMIZERS[name], schedule, steps=20, sizes=(8, 8, 8, 3))


@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad"])
@pytest.mark.parametrize("pattern", ["ab", "abo", "oaaaaoabbbb"])
def test_two_steps_and_ordinary_ones_share_an_optimizer(name, pattern):
    """``a`` and ``b`` have losses of their own, and ``o`` is the step of ``a`` that is not captured."""

    def trained(wrap):
        run = Run(OPTIMIZERS[name])

        def other(x, y):
            run.optimizer.zero_grad()
            loss = run.net(x).sigmoid().sub(y[:, None]).square().mean()
            loss.backward()
            run.optimizer.step()
            return loss

        steps = {"a": wrap(run.step), "b": wrap(other), "o": run.step}
        losses = []
        for kind, (x, y) in zip(itertools.cycle(pattern), batches(34), strict=False):
            losses.append(steps[kind](x.to(DEVICE), y.to(DEVICE)).item())
        return losses, run.state()

    (losses, state), (expected, wanted) = trained(capture), trained(lambda step: step)
    assert losses == expected
    assert_same(state, wanted)


def test_steps_that_train_other_parameters_do_not_share_counts_of_steps():
    """The counts of the layer that both train go ahead of the others', for which the first reads them, too."""
    run = Run(OPTIMIZERS["adam"])

    def last(x, y):
        run.optimizer.zero_grad()
        loss = F.cross_entropy(run.net.last(run.net.first(x).detach()), y)
        loss.backward()
        run.optimizer.step()

    whole = capture(run.step)
    data = [(x.to(DEVICE), y.to(DEVICE)) for x, y in batches(6)]
    for x, y in data:
        whole(x, y)
    last(*data[0])
    with pytest.raises(CaptureError, match="counts of steps that Adam keeps"):
        whole(*data[0])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_schedules(name, optimizer):
    check_alike(OPTIMIZERS[optimizer], SCHEDULES[name])


def test_a_learning_rate_that_equals_another_number():
    """What comes from the rate is told from what does not, though both are 0.01 when it is recorded."""
    data = batches(14)
    runs = []
    for captured in (False, True):
        run = Run(lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.01, momentum=0.9))
        losses = run.train(data[:6], False) if not captured else []
        step = capture(run.step) if captured else run.step
        for number, (x, y) in enumerate(data):
            if not captured and number < 6:
                continue
            if number == 8:
                run.optimizer.param_groups[0]["lr"] = 0.5
            losses.append(step(x.to(DEVICE), y.to(DEVICE)).item())
        runs.append((losses, run.state()))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[1][1], runs[0][1])


def test_groups_with_rates_of_their_own():
    def groups(parameters):
        first, *rest = parameters
        return torch.optim.AdamW(
            [{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.01, "weight_decay": 0.1}]
        )

    check_alike(groups, SCHEDULES["steps"])


@pytest.mark.parametrize("optimizer", ["adam fused", "syncfree adam"])
def test_a_gradient_scaler(optimizer):
    check_alike(OPTIMIZERS[optimizer], scaler=True)


def test_a_gradient_scaler_that_reads_is_refused():
    run = Run(OPTIMIZERS["momentum"], scaler=True)
    with pytest.raises(CaptureError, match="reads a value"):
        run.train(batches(4), True)


def test_a_thousand_steps():
    """With a schedule, dropout and clipping; memory stays flat, and one program runs."""
    data = batches(7)
    lazy, captured = (Run(OPTIMIZERS["adamw"], SCHEDULES["lambda"], clip=0.5) for _ in range(2))
    torch_xla.manual_seed(1)
    expected = [lazy.train([data[i % 7]], False)[0] for i in range(1000)]
    torch_xla.manual_seed(1)
    step = capture(captured.step)
    losses, memory, compiled = [], [], []
    for i in range(1000):
        x, y = data[i % 7]
        losses.append(step(x, y).item())
        if i in (20, 999):
            gc.collect()
            runtime.wait()
            memory.append(runtime.client().memory_info(0).bytes_used)
            compiled.append(counters.all_counters()["UncachedCompile"])
    assert losses == expected
    # a byte of each step would be more; the numbers of the last one may still be in use
    assert abs(memory[1] - memory[0]) < 500
    assert compiled[0] == compiled[1]
    assert_same(captured.state(), lazy.state())


def test_stop_save_load_and_go_on():
    data = batches(24)
    straight = Run(OPTIMIZERS["adam"], SCHEDULES["cosine"])
    expected = straight.train(data, True)
    first = Run(OPTIMIZERS["adam"], SCHEDULES["cosine"])
    losses = first.train(data[:12], True)
    file = io.BytesIO()
    torch.save(
        {
            "net": first.net.state_dict(),
            "optimizer": first.optimizer.state_dict(),
            "schedule": first.schedule.state_dict(),
        },
        file,
    )
    state = random_state.get_state(0)
    second = Run(OPTIMIZERS["adam"], SCHEDULES["cosine"])
    file.seek(0)
    saved = torch.load(file)
    second.net.load_state_dict(saved["net"])
    second.optimizer.load_state_dict(saved["optimizer"])
    second.schedule.load_state_dict(saved["schedule"])
    random_state.set_state(state, 0)
    losses += second.train(data[12:], True)
    assert losses == expected
    assert_same(second.state(), straight.state())


def test_parameters_loaded_in_place_are_taken_up():
    run = Run(OPTIMIZERS["sgd"])
    run.train(batches(6), True)
    other = copy.deepcopy(run.net.state_dict())
    twin = Run(OPTIMIZERS["sgd"])
    twin.net.load_state_dict(other)
    for module in (run.net, twin.net):
        with torch.no_grad():
            module.first.weight.mul_(0.5)
    torch_xla.manual_seed(5)
    x, y = (t.to(DEVICE) for t in batches(1)[0])
    found = run.captured(x, y).item()
    torch_xla.manual_seed(5)
    assert twin.step(x, y).item() == found


def test_random_numbers_are_drawn_again_in_checkpoints():
    class Twice(Net):
        def hidden(self, x):
            return self.drop(F.relu(self.first(x)))

        def forward(self, x):
            return self.last(self.norm(checkpoint(self.hidden, x, use_reentrant=False)))

    check_alike(OPTIMIZERS["sgd"], net=Twice)


def test_two_optimizers_in_one_step():
    def play(captured):
        torch.manual_seed(0)
        made, judge = (nn.Linear(4, 4).to(DEVICE) for _ in range(2))
        optimizers = [
            torch.optim.Adam(made.parameters(), lr=0.1),
            torch.optim.SGD(judge.parameters(), lr=0.2, momentum=0.1),
        ]
        schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.5)

        def step(x):
            for optimizer in optimizers:
                optimizer.zero_grad()
                judge(made(x)).pow(2).mean().backward()
                optimizer.step()
            schedule.step()
            return judge(made(x)).sum()

        called = capture(step) if captured else step
        return [called(torch.full((2, 4), i / 7, device=DEVICE)).item() for i in range(10)]

    assert play(True) == play(False)


def test_an_lstm():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTM(2, 5, batch_first=True)
            self.last = nn.Linear(5, 3)

        def forward(self, x):
            return self.last(self.cell(x.view(-1, 3, 2))[0][:, -1])

    check_alike(OPTIMIZERS["adam"], net=Recurrent)


def test_gradients_that_are_added_up():
    """Two micro-steps of their own, and a step that uses and clears what they left."""

    def play(captured):
        torch.manual_seed(0)
        net = nn.Linear(3, 2).to(DEVICE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def accumulate(x):
            loss = net(x).pow(2).mean()
            loss.backward()
            return loss

        def update():
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        if captured:
            accumulate, update = capture(accumulate), capture(update)
        losses = []
        for i in range(14):
            losses.append(accumulate(torch.full((2, 3), i / 5, device=DEVICE)).item())
            if i % 2:
                update()
        if captured:
            assert accumulate.recordings == update.recordings == 1
        return losses, [p.cpu() for p in net.parameters()]

    (losses, values), (found, others) = play(False), play(True)
    assert losses == found
    assert all(map(torch.equal, values, others))


def test_gradients_cleared_outside():
    def play(captured):
        torch.manual_seed(0)
        net = nn.Linear(3, 2).to(DEVICE)

        def backward(x):
            net(x).pow(2).mean().backward()

        step = capture(backward) if captured else backward
        seen = []
        for i in range(6):
            net.zero_grad()
            step(torch.full((2, 3), i / 5, device=DEVICE))
            seen.append(net.weight.grad)  # kept: each has its own value
        return [g.cpu() for g in seen]

    assert all(map(torch.equal, play(True), play(False)))


@pytest.mark.parametrize("kept", [True, False])
def test_a_gradient_that_got_another_storage(kept):
    """``grad.data = ...`` between two steps: the next gradient is seen, whoever still has the former storage."""

    def play(captured):
        run, seen, former = Run(OPTIMIZERS["sgd"]), [], []
        step = capture(run.step) if captured else run.step
        for i, (x, y) in enumerate(batches(8)):
            step(x.to(DEVICE), y.to(DEVICE))
            grad = run.net.last.weight.grad
            seen.append(grad.cpu())
            if kept:
                former.append(grad.data)
            if i == 5:
                grad.data = torch.ones_like(grad)
        return seen

    assert all(map(torch.equal, play(True), play(False)))


def test_a_gradient_that_is_added_to_and_got_another_storage():
    net = nn.Linear(3, 2).to(DEVICE)

    @capture
    def accumulate(x):
        net(x).sum().backward()

    x = torch.ones(2, 3, device=DEVICE)
    for _ in range(5):
        accumulate(x)
    former = net.weight.grad.data
    net.weight.grad.data = torch.ones_like(former)
    accumulate(x)
    assert accumulate.recordings == 1
    assert net.weight.grad.tolist() == [[3.0] * 3] * 2
    assert former.tolist() == [[10.0] * 3] * 2


def test_a_tensor_saved_for_backward_is_known_to_have_changed():
    run = Run(OPTIMIZERS["sgd"])
    run.train(batches(5), True)
    x, y = (t.to(DEVICE) for t in batches(1)[0])
    before = (run.net.last.weight**2).sum()
    run.captured(x, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


def test_checked_while_it_is_replayed():
    data = batches(20)
    lazy, captured = (Run(OPTIMIZERS["adam"], SCHEDULES["cosine"]) for _ in range(2))
    torch_xla.manual_seed(1)
    expected = lazy.train(data, False)
    torch_xla.manual_seed(1)
    recorded = counters.all_counters().get("CapturedStepRecorded", 0)
    assert captured.train(data, True, check_every=4) == expected
    assert counters.all_counters()["CapturedStepRecorded"] - recorded == 2 + 4
    assert_same(captured.state(), lazy.state())
