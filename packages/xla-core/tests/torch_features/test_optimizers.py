"""Every optimizer and learning-rate schedule of torch.optim: twenty steps on ``xla`` against the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

import torch_xla
from xla_core.support import counters
from xla_core.testing.against_cpu import fallbacks

STEPS = 20
# The first step makes the optimizer's state and the second one finds it: from the third on, all is known.
SETTLED = 3

# Steps are float32 on both devices, in different order: errors grow from step to step.
RTOL, ATOL = 1e-4, 1e-5
# Capturable optimizers compute corrections in float32 tensors, where the CPU has Python's float64.
ATOL_CAPTURABLE = 1e-4

_TEMPO = {"foreach": {}, "single": {"foreach": False}}
_CAPTURABLE = {**_TEMPO, "capturable": {"capturable": True}}
_FUSED = {"fused": {"fused": True}}

# Settings that change what an optimizer computes, and forms of computing the same.
OPTIMIZERS: list[tuple[type, dict[str, Any], dict[str, dict[str, Any]]]] = [
    (torch.optim.SGD, {"lr": 0.05}, _TEMPO | _FUSED),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}, _TEMPO | _FUSED),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}, _TEMPO | _FUSED),
    (torch.optim.Adam, {"lr": 0.01}, _CAPTURABLE | _FUSED),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}, _CAPTURABLE | _FUSED),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, _CAPTURABLE | _FUSED),
    (torch.optim.AdamW, {"lr": 0.01, "maximize": True}, _TEMPO),
    (torch.optim.Adagrad, {"lr": 0.05}, _TEMPO | _FUSED),
    (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1}, _TEMPO),
    (torch.optim.Adadelta, {"lr": 1.0, "rho": 0.8}, _CAPTURABLE),
    (torch.optim.Adafactor, {"lr": 0.02}, _TEMPO),
    (torch.optim.Adamax, {"lr": 0.01}, _CAPTURABLE),
    (torch.optim.ASGD, {"lr": 0.05, "t0": 10}, _CAPTURABLE),
    (torch.optim.NAdam, {"lr": 0.01, "decoupled_weight_decay": True}, _CAPTURABLE),
    (torch.optim.RAdam, {"lr": 0.01}, _CAPTURABLE),
    (torch.optim.RMSprop, {"lr": 0.01}, _CAPTURABLE),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}, _TEMPO),
    (torch.optim.Rprop, {"lr": 0.01}, _CAPTURABLE),
]
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS.append((torch.optim.Muon, {"lr": 0.05}, {"single": {}}))

# What the host decides by the step's number is a program of its own: rectification sets in at the
# sixth step, averaging after step ``t0``.
SETTLES_LATER = {
    (torch.optim.RAdam, "foreach"): 7,
    (torch.optim.RAdam, "single"): 7,
    (torch.optim.ASGD, "foreach"): 13,
    (torch.optim.ASGD, "single"): 13,
}


class Run:
    """A small model, its data and its optimizer on one device."""

    def __init__(self, device: str, make: Callable[[list[nn.Parameter]], Any]) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
        self.data = [torch.randn(5, 6).to(device) for _ in range(STEPS)]
        self.model = copy.deepcopy(model).to(device)
        self.optimizer = make(list(self.model.parameters()))

    def step(self, index: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(self.data[index]).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().cpu() for p in self.model.parameters()]


def assert_same_weights(device: Run, host: Run, atol: float = ATOL) -> None:
    for got, expected in zip(device.weights(), host.weights(), strict=True):
        torch.testing.assert_close(got, expected, rtol=RTOL, atol=atol)


def compilations() -> int:
    return counters.all_counters().get("UncachedCompile", 0)


CASES = [
    pytest.param(cls, settings, form, kwargs, id=f"{cls.__name__}-{form}-{'-'.join(settings)}")
    for cls, settings, forms in OPTIMIZERS
    for form, kwargs in forms.items()
]


@pytest.mark.parametrize(("cls", "settings", "form", "kwargs"), CASES)
def test_optimizer(cls: type, settings: Any, form: str, kwargs: Any) -> None:
    on_cpu = {k: v for k, v in kwargs.items() if k != "capturable"}  # for accelerators only
    host = Run("cpu", lambda p: cls(p, **settings, **on_cpu))
    device = Run("xla", lambda p: cls(p, **settings, **kwargs))
    settled = SETTLES_LATER.get((cls, form), SETTLED)
    known = None
    with fallbacks() as ran_on_cpu:
        for index in range(STEPS):
            if index == settled:
                known = compilations()
            host.step(index)
            device.step(index)
            torch_xla.sync()
    assert compilations() == known
    assert_same_weights(device, host, ATOL_CAPTURABLE if "capturable" in kwargs else ATOL)
    assert not ran_on_cpu


def test_lbfgs() -> None:
    # Decides on the host by values of the loss, so it fetches them and its steps are not alike.
    runs = [
        Run(device, lambda p: torch.optim.LBFGS(p, lr=0.5, line_search_fn="strong_wolfe"))
        for device in ("cpu", "xla")
    ]
    with fallbacks() as ran_on_cpu:
        for run in runs:

            def closure(run: Run = run) -> torch.Tensor:
                run.optimizer.zero_grad()
                loss = run.model(run.data[0]).square().mean()
                loss.backward()
                return loss

            for _ in range(2):
                loss = run.optimizer.step(closure)
    assert_same_weights(runs[1], runs[0])
    assert loss.item() < 1e-2
    assert not ran_on_cpu


def test_parameter_groups_with_their_own_learning_rates() -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        first, last = {"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:]}
        return torch.optim.AdamW([first, last], lr=0.01)

    host, device = Run("cpu", make), Run("xla", make)
    for index in range(STEPS):
        host.step(index)
        device.step(index)
        torch_xla.sync()
    assert_same_weights(device, host)


def test_a_learning_rate_in_a_tensor() -> None:
    host = Run("cpu", lambda p: torch.optim.SGD(p, lr=torch.tensor(0.05)))
    device = Run("xla", lambda p: torch.optim.SGD(p, lr=torch.tensor(0.05, device="xla")))
    for index in range(STEPS):
        host.step(index)
        device.step(index)
        torch_xla.sync()
    assert_same_weights(device, host)


def test_the_state_goes_to_the_cpu_and_back() -> None:
    make = lambda p: torch.optim.Adam(p, lr=0.01)  # noqa: E731
    host, device = Run("cpu", make), Run("xla", make)
    for index in range(STEPS // 2):
        host.step(index)
        device.step(index)
        torch_xla.sync()
    state = _on_cpu(device.optimizer.state_dict())
    device.optimizer = make(list(device.model.parameters()))
    device.optimizer.load_state_dict(state)
    assert device.optimizer.state_dict()["state"][0]["exp_avg"].device.type == "xla"
    for index in range(STEPS // 2, STEPS):
        host.step(index)
        device.step(index)
        torch_xla.sync()
    assert_same_weights(device, host)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return [_on_cpu(item) for item in value] if isinstance(value, list) else value


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: schedules.StepLR(o, 3),
    "multistep": lambda o: schedules.MultiStepLR(o, [4, 9]),
    "constant": lambda o: schedules.ConstantLR(o, 0.3, 5),
    "linear": lambda o: schedules.LinearLR(o, 0.1, 1.0, 8),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9),
    # Longer than the test: a rate of exactly zero is a constant, and one more program.
    "polynomial": lambda o: schedules.PolynomialLR(o, STEPS + 5, 2.0),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, STEPS + 5),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 5),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 4, cycle_momentum=False),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, STEPS + 1),
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.95),
    "sequence": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, 1.0, 4), schedules.ExponentialLR(o, 0.9)], [4]
    ),
    "chain": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.5, 3), schedules.ExponentialLR(o, 0.9)]
    ),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1, threshold=0.2),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule(name: str) -> None:
    make = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)  # noqa: E731
    runs = [Run(device, make) for device in ("cpu", "xla")]
    schedulers = [SCHEDULES[name](run.optimizer) for run in runs]
    rates: dict[Run, list[float]] = {run: [] for run in runs}
    known = None
    for index in range(STEPS):
        if index == SETTLED:
            known = compilations()
        for run, scheduler in zip(runs, schedulers, strict=True):
            loss = run.step(index)
            scheduler.step(*([loss.item()] if name == "plateau" else []))
            rates[run].append(run.optimizer.param_groups[0]["lr"])
        torch_xla.sync()
    assert compilations() == known
    assert rates[runs[1]] == pytest.approx(rates[runs[0]])
    assert len(set(rates[runs[0]])) > 1, "the schedule did nothing"
    assert_same_weights(runs[1], runs[0])
