"""Counters and metrics mean what they mean in torch_xla: when they rise, and under which names."""

from __future__ import annotations

import pytest
import torch

import torch_xla
import torch_xla.debug.metrics as met
from torch_xla import _XLAC
from torch_xla.experimental import eager
from xla_core.testing.internals import keep_numbers


@pytest.fixture(autouse=True)
def nothing_counted():
    torch_xla.sync()
    met.clear_all()


def _batch_norm():
    torch.nn.BatchNorm1d(2, device="xla")(torch.ones(3, 2, device="xla"))


def _in_place(name, *args):
    return lambda: getattr(torch.ones(2, device="xla"), name)(*args)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: torch.ones(2, device="xla") + 1, "xla::add"),
        (_in_place("add_", 2), "xla::add"),
        (_in_place("__imul__", 2), "xla::mul"),
        (_in_place("relu_"), "xla::relu"),
        (_batch_norm, "xla::native_batch_norm"),
    ],
)
def test_an_operator_is_counted_when_it_is_called(call, name):
    call()
    assert met.counter_value(name) == 1
    call()
    assert met.counter_value(name) == 2
    torch_xla.sync()
    assert met.counter_value(name) == 2
    call()
    torch_xla.sync()
    assert met.counter_value(name) == 3
    assert name + "_" not in met.counter_names()


def test_what_was_called_before_the_counters_were_cleared_is_not_counted():
    x = torch.ones(2, device="xla") + 1
    met.clear_counters()
    y = x * 3
    torch_xla.sync()
    assert met.counter_value("xla::add") is None
    assert met.counter_value("xla::mul") == 1 and y.tolist() == [6.0, 6.0]


def test_operators_whose_results_nobody_wants_are_counted():
    torch.ones(2, device="xla").cosh()
    torch_xla.sync()
    assert met.counter_value("xla::cosh") == 1


def test_a_recorded_graph_counts_its_operators_when_it_is_recorded():
    compiled = torch.compile(lambda t: t.sinh() + 1, backend="openxla")
    x = torch.ones(2).to("xla")
    for _ in range(3):
        compiled(x)
    assert met.counter_value("xla::sinh") == 1
    assert met.counter_value("ExecuteComputation") == 3


def test_values_that_are_read_are_counted():
    x = torch.ones(2, device="xla")
    torch_xla.sync()
    met.clear_all()
    x.cpu()
    assert met.counter_value("xla::_to_copy") == 1
    assert met.counter_value("xla::_to_cpu") is None
    assert met.executed_fallback_ops() == []
    assert x.sum().item() == 2
    assert met.counter_value("aten::_local_scalar_dense") == 1
    assert met.executed_fallback_ops() == ["aten::_local_scalar_dense"]
    assert met.counter_value("xla::_to_cpu") == 1
    # metrics first, then counters
    assert met.short_metrics_report().startswith("Metric: CompileTime\n")
    assert met.short_metrics_report().endswith("Counter: aten::_local_scalar_dense\n  Value: 1\n")


def test_tensors_and_runs_are_counted():
    torch.ones(2).to("xla")
    _XLAC._xla_increment_counter("CreateXlaTensor", 3)
    assert met.counter_value("CreateXlaTensor") == 4
    torch.ones(2, device="xla") + 1
    assert met.counter_value("CreateXlaTensor") == 6
    x = torch.ones(2, device="xla")
    torch_xla.sync()
    assert met.counter_value("ExecuteComputation") == 1 and x.tolist() == [1.0, 1.0]


@pytest.fixture
def numbers_stay():
    """Numbers of steps stay on the device."""
    keep_numbers(True)
    yield
    keep_numbers(False)


def test_equal_numbers_are_copied_to_the_device_once(numbers_stay):
    x, y = torch.ones(2).to("xla"), torch.full((2,), 2.0).to("xla")
    torch_xla.sync()
    met.clear_all()
    found = []
    for _ in range(3):
        x.addcdiv_(x, y, value=0.1)
        torch_xla.sync()
        found.append(met.metric_data("TransferToDeviceTime")[0])
    assert found == [1, 1, 1]
    assert met.counter_value("DeviceDataCacheMiss") == 1
    x.addcdiv_(x, y, value=0.3)
    torch_xla.sync()
    assert met.counter_value("DeviceDataCacheMiss") == 2
    assert x.tolist() == pytest.approx([1.05**3 * 1.15] * 2)


def test_a_step_block_ends_two_steps():
    with torch_xla.step():
        torch.ones(2, device="xla") + 1
    assert met.counter_value("MarkStep") == 2


def test_a_step_block_that_raises_ends_two_steps_too():
    x = torch.ones(2, device="xla")
    with pytest.raises(KeyError), torch_xla.step():
        x += 1
        raise KeyError("x")
    assert met.counter_value("MarkStep") == 2
    assert not _XLAC._check_tensor_need_materialization([x])[0]
    assert x.tolist() == [2.0, 2.0]


def test_eager_operators_have_metrics_of_their_own():
    with eager.eager_mode_context(True):
        x = torch.ones(3, device="xla").tan()
        x + 5
    names = met.metric_names()
    assert "EagerOpCompileTime" in names and "EagerOpExecuteTime" in names
    assert "CompileTime" not in names and "ExecuteTime" not in names
    assert met.metric_data("EagerOpExecuteTime")[0] == 3
    assert met.counter_value("xla::tan") == 1
    torch_xla.compile(lambda: x.tan() * 3)()
    torch_xla.sync()
    with eager.eager_mode_context(True):
        run = torch_xla.compile(lambda t: t.tan() * 3)
        y = run(x)
    assert met.metric_data("ExecuteTime")[0] >= 1 and y.shape == (3,)


def test_a_set_donation_is_counted():
    x = torch.ones(2).to("xla")
    assert _XLAC._set_buffer_donation(x, True)
    assert met.counter_value("XlaSetBufferDonation") == 1
