"""Operators without a lowering: computed on the CPU, right, counted, and warned about once."""

from __future__ import annotations

import warnings

import pytest
import torch

import torch_xla
from xla_core.contract import events
from xla_core.dispatch import cpu_fallback
from xla_core.dispatch.cpu_fallback import FallbackWarning

LIBRARY = torch.library.Library("xla_core_tests", "DEF")
LIBRARY.define("halves(Tensor x) -> (Tensor, Tensor)")
LIBRARY.define("bump_(Tensor(a!) self, int by=1) -> Tensor(a!)")
LIBRARY.define("bump_all_(Tensor(a!)[] self) -> ()")
LIBRARY.define("square.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
LIBRARY.define("count(Tensor x, Tensor[] more, *, str what) -> int")
LIBRARY.impl("halves", lambda x: (x / 2, x // 2), "CPU")
LIBRARY.impl("bump_", lambda self, by=1: self.add_(by), "CPU")
LIBRARY.impl("bump_all_", lambda self: [x.add_(1) for x in self] and None, "CPU")
LIBRARY.impl("square.out", lambda x, *, out: out.copy_(x * x), "CPU")
LIBRARY.impl("count", lambda x, more, *, what: sum(int(t.sum()) for t in (x, *more)), "CPU")
OPS = torch.ops.xla_core_tests


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(cpu_fallback, "_warned", set())


def test_the_warning_names_operator_and_line_once(fallbacks):
    x = torch.arange(4, device="xla")
    call = lambda: OPS.halves(x)  # noqa: E731 - its line is the one to be named
    line = call.__code__.co_firstlineno
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            call()
    (warning,) = caught
    assert warning.category is FallbackWarning
    assert (warning.filename, warning.lineno) == (__file__, line)
    message = str(warning.message)
    assert "xla_core_tests::halves has no XLA lowering and runs on the CPU" in message
    assert f"First called at {__file__}:{line}" in message
    assert fallbacks() == {}  # counted under its own namespace, not aten's


def test_the_counter_is_in_the_metrics_report():
    with pytest.warns(FallbackWarning):
        before = torch_xla._XLAC._xla_metrics_report()
        OPS.halves(torch.ones(1, device="xla"))
        OPS.halves(torch.ones(1, device="xla"))
    report = torch_xla._XLAC._xla_metrics_report()
    assert count_in(report) == count_in(before) + 2


def count_in(report):
    lines = report.splitlines()
    name = "Counter: xla_core_tests::halves"
    return int(lines[lines.index(name) + 1].removeprefix("  Value: ")) if name in lines else 0


@pytest.mark.filterwarnings("ignore:xla_core_tests")
def test_results_of_every_kind():
    x = torch.tensor([3.0, -4.0], device="xla")
    a, b = OPS.halves(x * 2)
    assert a.device.type == b.device.type == "xla"
    assert (a.tolist(), b.tolist()) == ([3, -4], [3, -4])
    assert OPS.count(x, [x, x], what="sum") == -3
    assert OPS.halves(x.view(1, 2)[:, 1:])[0].tolist() == [[-2]]


@pytest.mark.filterwarnings("ignore:xla_core_tests")
def test_in_place_writes_reach_the_device():
    x = torch.zeros(2, 3, device="xla")
    y = OPS.bump_(x)
    assert y is x
    assert x.tolist() == [[1] * 3] * 2
    OPS.bump_(x[1], 5)  # through a view
    OPS.bump_(x.t()[0], by=10)
    assert x.tolist() == [[11, 1, 1], [16, 6, 6]]
    z = torch.zeros(1, device="xla")
    assert OPS.bump_all_([x, z]) is None
    assert (x[0, 0].item(), z.item()) == (12, 1)


@pytest.mark.filterwarnings("ignore:xla_core_tests")
def test_out_arguments():
    x, out = torch.tensor([3.0, 4.0], device="xla"), torch.zeros(2, device="xla")
    assert OPS.square(x, out=out) is out
    assert out.tolist() == [9, 16]
    OPS.square(x[:1], out=out[1:])
    assert out.tolist() == [9, 9]


@pytest.mark.filterwarnings("ignore:xla_core_tests")
def test_gradients_of_an_operator_on_the_cpu():
    @torch.library.custom_op("xla_core_tests::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() ** 3)

    torch.library.register_autograd(
        "xla_core_tests::cube",
        lambda ctx, gradient: 3 * ctx.saved_tensors[0] ** 2 * gradient,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    x = torch.tensor([2.0], device="xla", requires_grad=True)
    y = cube(x * 1.0)
    y.backward()
    assert (y.item(), x.grad.item()) == (8, 12)


def test_errors_of_the_cpu_come_through():
    LIBRARY.define("refuse(Tensor x) -> Tensor")

    def refuse(x):
        raise ValueError("not this one")

    LIBRARY.impl("refuse", refuse, "CPU")
    seen = []
    unsubscribe = events.subscribe(events.Fallback, seen.append)
    try:
        with pytest.warns(FallbackWarning), pytest.raises(ValueError, match="not this one"):
            OPS.refuse(torch.ones(1, device="xla"))
    finally:
        unsubscribe()
    assert [told.operator for told in seen] == ["xla_core_tests::refuse"]


def test_listeners_are_told():
    seen = []
    unsubscribe = events.subscribe(events.Fallback, seen.append)
    try:
        with pytest.warns(FallbackWarning):
            OPS.halves(torch.ones(1, device="xla"))
    finally:
        unsubscribe()
    (told,) = seen
    assert told.operator == "xla_core_tests::halves"
    assert told.filename == __file__
    assert told.nanoseconds > 0


def test_an_operator_of_pytorch_is_counted_under_its_name(fallbacks):
    with pytest.warns(FallbackWarning, match="aten::linalg_ldl_factor_ex has no XLA lowering"):
        torch.linalg.ldl_factor(torch.eye(2, device="xla"))
    torch.linalg.ldl_factor(torch.eye(2, device="xla"))
    assert fallbacks() == {"aten::linalg_ldl_factor_ex": 2}


def test_what_was_pending_is_kept():
    x = torch.ones(3, device="xla")
    y = x + 1
    x.mul_(5)
    with pytest.warns(FallbackWarning):
        half, _ = OPS.halves(y)
    assert half.tolist() == [1] * 3
    assert (x.tolist(), y.tolist()) == ([5] * 3, [2] * 3)
