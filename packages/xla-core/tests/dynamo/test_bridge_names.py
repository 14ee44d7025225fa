"""The further names of torch_xla's bridge to torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import torch_xla
import torch_xla._dynamo.config
from torch_xla._dynamo import dynamo_backend2, dynamo_bridge
from torch_xla._internal import custom_kernel
from torch_xla.core import dynamo_bridge as core_bridge
from xla_core.support import counters


def test_pending_values_may_be_refused(monkeypatch):
    compiled = torch.compile(lambda t: t * 2, backend="openxla")
    ready = torch.ones(2, device="xla")
    torch_xla.sync()
    assert torch_xla._dynamo.config.skip_input_data_check is False
    monkeypatch.setattr(torch_xla._dynamo.config, "skip_input_data_check", True)
    assert compiled(ready).tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="can not be a pending ir"):
        compiled(ready + 1)
    monkeypatch.undo()
    assert compiled(ready + 1).tolist() == [4.0, 4.0]


def test_runs_for_arguments_that_are_pending_are_counted_from_the_second_call():
    compiled = torch.compile(lambda t: t * 3, backend="openxla")
    counters.clear()
    seen = []
    for _ in range(2):
        assert compiled(torch.ones(2, device="xla") + 1).tolist() == [6.0, 6.0]
        seen.append(counters.all_counters().get("DynamoSyncInputExecuteTime"))
    ready = torch.ones(2, device="xla")
    torch_xla.sync()
    compiled(ready)
    seen.append(counters.all_counters().get("DynamoSyncInputExecuteTime"))
    assert seen == [None, 1, 1]


def test_the_backend_as_a_function():
    graph = fx.symbolic_trace(lambda x, y: (torch.sin(x) + y,))
    given = torch.randn(3), torch.randn(3)
    on_device = tuple(t.to("xla") for t in given)
    (found,) = dynamo_backend2.dynamo_backend(graph, on_device)(*on_device)
    torch.testing.assert_close(found.cpu(), graph(*given)[0])
    assert dynamo_bridge.extract_compiled_graph_helper is core_bridge.extract_compiled_graph


def test_lists_with_nones_and_repetitions():
    remover, values = dynamo_bridge.NoneRemover(), [None, 1, None, 2]
    remover.remove_nones(values)
    assert values == [1, 2]
    remover.add_nones(values)
    assert values == [None, 1, None, 2]
    deduper, one, two = dynamo_bridge.Deduper(), object(), object()
    assert deduper.dedup([one, two, one]) == [one, two]
    assert deduper.recover(["a", "b"]) == ["a", "b", "a"]


def test_operators_that_ran_on_the_cpu():
    torch.linalg.eigvals(torch.eye(2, device="xla")).cpu()
    assert all(
        text.startswith("aten::") and "=" in text for text in dynamo_bridge.get_fallback_ops()
    )
    assert dynamo_bridge.is_xla_tensor(torch.ones(1, device="xla"))
    assert not dynamo_bridge.is_xla_tensor(torch.ones(1))


def test_values_that_are_given_away():
    given = torch.ones(4).to("xla")
    torch_xla.sync()
    assert custom_kernel.dynamo_set_buffer_donor_(given, True) is given
    assert torch_xla._XLAC._get_buffer_donation(given)
    custom_kernel.dynamo_set_buffer_donor_xla_(given, False)
    assert not torch_xla._XLAC._get_buffer_donation(given)


def test_a_compiled_function_gives_arguments_away(compile_count):
    @torch.compile(backend="openxla")
    def total(a, b):
        torch.ops.xla.dynamo_set_buffer_donor_(a, True)
        return a + b

    b = torch.ones(100).to("xla")
    torch_xla.sync()
    before = None
    for value in (1.0, 2.0, 3.0):
        a = torch.full((100,), value).to("xla")
        torch_xla.sync()
        place = torch_xla._XLAC._unsafe_buffer_pointer(a)
        found = total(a, b)
        assert torch_xla._XLAC._unsafe_buffer_pointer(found) == place
        assert torch_xla._XLAC._is_placecholder(a)
        with pytest.raises(RuntimeError, match="value was donated"):
            a.cpu()
        assert found.tolist() == [value + 1] * 100
        assert b.tolist() == [1.0] * 100
        before = compile_count() if before is None else before
    assert compile_count() == before


def test_a_compiled_function_keeps_arguments_that_no_result_can_replace():
    @torch.compile(backend="openxla")
    def of(a, b):
        torch.ops.xla.dynamo_set_buffer_donor_(a, True)
        torch.ops.xla.dynamo_set_buffer_donor_(b, True)
        torch.ops.xla.dynamo_set_buffer_donor_(b, False)
        return a.sum(), b + 1

    a, b = torch.ones(3).to("xla"), torch.ones(2).to("xla")
    torch_xla.sync()
    found = of(a, b)
    assert found[0].item() == 3.0 and found[1].tolist() == [2.0, 2.0]
    assert a.tolist() == [1.0] * 3 and b.tolist() == [1.0] * 2


def test_an_argument_that_is_returned_is_not_given_away():
    def of(a):
        given = torch.ops.xla.dynamo_set_buffer_donor_(a, True)
        return a, given + 1

    a = torch.ones(3).to("xla")
    torch_xla.sync()
    same, more = core_bridge.extract_compiled_graph(fx.symbolic_trace(of), (a,))(a)
    assert same.tolist() == a.tolist() == [1.0] * 3 and more.tolist() == [2.0] * 3


def test_the_operator_is_nothing_to_other_devices():
    given = torch.ones(3)
    assert torch.ops.xla.dynamo_set_buffer_donor_(given, True) is given
