"""``torch.compile(backend='openxla')`` on ``xla`` tensors."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import torch_xla
from torch_xla.core import dynamo_bridge
from xla_core.compilation import program_table
from xla_core.recording.xla_tensor import XLATensor, XLATensorType
from xla_core.support import counters


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function):
    return torch.compile(function, backend="openxla")


def count(name):
    return counters.all_counters().get(name, 0)


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 2))


def test_training_repeats_one_forward_and_one_backward_program_a_hundred_times(compile_count):
    cpu = small_model()
    model = copy.deepcopy(cpu).to("xla")
    step = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    reference = torch.optim.SGD(cpu.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1)
    batches = [torch.randn(6, 4) for _ in range(4)]
    graphs, again = count("DynamoExtractCompiledGraph"), count("DynamoGraphRecordedAgain")
    for number in range(103):
        if number == 3:  # momentum exists from the second step on
            before, extracted = compile_count(), count("DynamoExtractCompiledGraph")
        batch = batches[number % 4]
        optimizer.zero_grad()
        reference.zero_grad()
        loss = step(batch.to("xla")).square().mean()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        expected = cpu(batch).square().mean()
        expected.backward()
        reference.step()
    assert extracted == graphs + 2
    assert count("DynamoExtractCompiledGraph") == extracted
    assert compile_count() == before
    assert count("DynamoGraphRecordedAgain") == again
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-3, atol=1e-5)
    for mine, theirs in zip(model.buffers(), cpu.buffers(), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-3, atol=1e-5)


def test_a_graph_runs_without_recording_anything():
    f = compiled(lambda x: (x @ x).relu() + 1)
    x = torch.randn(5, 5, device="xla")
    f(x)
    trace = x._s.trace
    trace.flush(trace)
    y = f(x)
    assert trace.cur.depth == 0
    torch.testing.assert_close(y.cpu(), (x.cpu() @ x.cpu()).relu() + 1)


def test_inference_and_no_grad():
    model = small_model().eval()
    expected = model(torch.ones(3, 4))
    on_device = copy.deepcopy(model).to("xla")
    step = compiled(on_device)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = step(torch.ones(3, 4, device="xla"))
        assert type(found) is XLATensor
        assert not found.requires_grad
        torch.testing.assert_close(found.cpu(), expected.detach())


def test_a_compiled_optimizer_step_donates_what_it_overwrites():
    model = nn.Linear(64, 64).to("xla")
    cpu = copy.deepcopy(model).cpu()
    # capturable: the step count is a tensor, as torch.compile wants it
    optimizers = [
        torch.optim.Adam(model.parameters(), lr=0.01, capturable=True),
        torch.optim.Adam(cpu.parameters(), lr=0.01),
    ]
    step = compiled(lambda: optimizers[0].step())
    for _ in range(3):
        for m, device in ((model, "xla"), (cpu, "cpu")):
            m(torch.ones(2, 64, device=device)).sum().backward()
        step()
        optimizers[1].step()
        for o in optimizers:
            o.zero_grad()
    torch.testing.assert_close(model.weight.detach().cpu(), cpu.weight.detach())
    programs = [p for p in _programs() if p.donated]
    assert max(len(p.donated) for p in programs) >= 4  # two parameters, their moments


def _programs():
    return program_table.all_programs()


def test_writing_to_an_argument_reaches_it_and_bumps_its_version():
    def add_one(x):
        x.add_(1)
        return x * 2

    f = compiled(add_one)
    for _ in range(2):
        x = torch.zeros(3, device="xla")
        alias = x.detach()
        version = x._version
        y = f(x)
        assert x.tolist() == alias.tolist() == [1, 1, 1]
        assert x._version > version
        assert y.tolist() == [2, 2, 2]


def test_donation_never_changes_what_somebody_else_holds():
    f = compiled(lambda x: x.mul_(3))
    x = torch.ones(4, device="xla")
    f(x)
    torch_xla.sync()
    kept = torch.empty(4, device="xla").copy_(x)
    torch_xla.sync()
    f(x)
    assert kept.tolist() == [3] * 4
    assert x.tolist() == [9] * 4


def test_views_as_arguments_and_results():
    f = compiled(lambda x: (x.t(), x.t() + 1, x[0]))
    base = torch.arange(24.0).reshape(4, 6)
    on_device = base.to("xla")
    for part in (on_device, on_device[1:3], on_device.t()[2:]):
        host = part.cpu()
        for found, expected in zip(f(part), (host.t(), host.t() + 1, host[0]), strict=True):
            assert torch.equal(found.cpu(), expected)


def test_writing_through_a_view():
    f = compiled(lambda row: row.fill_(7))
    x = torch.zeros(2, 3, device="xla")
    f(x[1])
    assert x.tolist() == [[0, 0, 0], [7, 7, 7]]


def test_random_numbers_differ_from_run_to_run_and_follow_the_seed():
    f = compiled(lambda x: nn.functional.dropout(x, 0.5))
    x = torch.ones(64, device="xla")
    first, second = f(x).tolist(), f(x).tolist()
    assert first != second
    torch.manual_seed(5)
    once = f(x).tolist()
    torch.manual_seed(5)
    assert f(x).tolist() == once


def test_other_shapes_and_numbers(compile_count):
    f = compiled(lambda x, k: x * k + x.shape[0])
    for rows, k in ((2, 2.5), (3, 2.5), (4, 3.5), (3, 4.5)):
        found = f(torch.ones(rows, 2, device="xla"), k)
        torch.testing.assert_close(found.cpu(), torch.full((rows, 2), k + rows))
    before = compile_count()
    f(torch.ones(4, 2, device="xla"), 9.5)
    assert compile_count() == before


def test_pending_arguments_are_run_first():
    f = compiled(lambda x: x + 1)
    x = torch.ones(3, device="xla") * 4
    assert f(x).tolist() == [5, 5, 5]
    assert f(torch.empty(2, device="xla")).shape == (2,)


def test_graph_breaks():
    def f(x):
        y = x * 2
        if y.sum() > 0:
            return y.cos()
        return y.sin()

    g = compiled(f)
    for value in (1.0, -1.0, 2.0):
        x = torch.full((3,), value)
        torch.testing.assert_close(g(x.to("xla")).cpu(), f(x))


@pytest.mark.filterwarnings("ignore:aten..linalg_ldl_factor_ex has no XLA lowering")
def test_a_graph_is_cut_where_an_operator_runs_on_the_cpu(fallbacks):
    """The parts before and behind are programs that are made once."""

    def f(x):
        return torch.linalg.ldl_factor_ex(torch.diag(x.sin() + 1)).LD.diagonal().cos() * 2

    g = compiled(f)
    names = ("DynamoGraphRecordedAgain", "UncachedCompile")
    for shift in range(4):
        x = torch.tensor([0.5, 0.6, 1.5]) + shift
        torch.testing.assert_close(g(x.to("xla")).cpu(), f(x))
        if shift == 0:
            before = [count(name) for name in names]
    assert [count(name) for name in names] == before
    # four calls, and once to find out where to cut
    assert fallbacks() == {"aten::linalg_ldl_factor_ex": 5}


@pytest.mark.parametrize("operator", ["segment_reduce", "eigvals"])
def test_training_with_an_operator_that_looks_at_values(operator):
    """Forward and backward graphs are cut; every program is made in the first step."""

    def f(x, w):
        y = x @ w
        if operator == "eigvals":  # with a check of its result, which is an effect to the graph
            y = torch.linalg.eigvals(y + torch.arange(3.0, device=x.device).diag()).real
        else:
            y = torch.segment_reduce(y, "sum", lengths=torch.tensor([1, 2], device=x.device))
        return y.cos().sum() + (x * w).sum()

    torch.manual_seed(0)
    values = [torch.randn(3, 3) / 10 for _ in range(2)]
    compiled_f = compiled(f)
    made = []
    for _ in range(3):
        here = [v.clone().requires_grad_() for v in values]
        there = [v.to("xla").requires_grad_() for v in values]
        f(*here).backward()
        compiled_f(*there).backward()
        for mine, wanted in zip(there, here, strict=True):
            # eigenvalues amplify the last places
            torch.testing.assert_close(mine.grad.cpu(), wanted.grad, rtol=1e-4, atol=1e-5)
        made.append(count("UncachedCompile"))
    assert made[1] == made[2]


def test_writing_to_an_argument_keeps_its_place_among_the_parts():
    def f(x):
        before = torch.linalg.eigvals(torch.diag(x)).real
        x.add_(1)
        return before * torch.linalg.eigvals(torch.diag(x)).real

    g = compiled(f)
    x = torch.tensor([0.5, 1.5])
    on_device = x.to("xla")
    for _ in range(3):
        torch.testing.assert_close(g(on_device).cpu(), f(x))
        torch.testing.assert_close(on_device.cpu(), x)


def test_partition_by_hand():
    model = torch.fx.symbolic_trace(lambda x: torch.linalg.eigvals((x + 1).diag()).real * 2)
    x = torch.tensor([0.5, 1.5])
    parts = dynamo_bridge.partition_fx_graph_for_cpu_fallback(model, [x.to("xla")], [], [])
    calls = [n.target for n in parts.graph.nodes if n.op == "call_module"]
    assert len(calls) == 3  # before, the operator, behind
    torch.testing.assert_close(parts((x + 1).to("xla")).cpu(), model(x + 1))
    whole = torch.fx.symbolic_trace(lambda x, y: x + y)
    one = dynamo_bridge.partition_fx_graph_for_cpu_fallback(whole, [x.to("xla")] * 2, [], [])
    assert one(x.to("xla"), x.to("xla")).tolist() == [1, 3]


def test_inputs_of_a_program_are_matched_by_id():
    kept = torch.ones(1)
    match = dynamo_bridge.GraphInputMatcher({7: 1, 9: 0}, [9, 8, 7], ["x", kept, "y"], {7, 9})
    assert match(["first", "second"]) == ["first", kept, "second"]
    assert match.graph_input_xla_values == [None, kept, None]


def test_an_error_in_the_graph_is_the_operators_own():
    f = compiled(lambda x, y: x @ y)
    with pytest.raises(RuntimeError, match=r"must have same reduction dim|cannot be multiplied"):
        f(torch.ones(2, 3, device="xla"), torch.ones(2, 3, device="xla"))


def test_other_threads_work_while_this_one_compiles():
    stop = threading.Event()
    errors = []

    def work():
        try:
            while not stop.is_set():
                torch.ones(3, device="xla").add_(1).tolist()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for size in (2, 3):
            compiled(small_model().to("xla"))(torch.ones(size, 4, device="xla")).sum().backward()
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert "__torch_dispatch__" not in XLATensorType.__dict__


def test_extract_compiled_graph_by_hand():
    graph = torch.fx.symbolic_trace(lambda x, y: (x + y, x))
    x, y = torch.ones(2, device="xla"), torch.full((2,), 3.0, device="xla")
    run = dynamo_bridge.extract_compiled_graph(graph, [x, y])
    total, same = run(x, y)
    assert total.tolist() == [4, 4]
    same.add_(5)  # what a graph returns is a value of its own
    assert x.tolist() == [1, 1]


def test_dynamos_settings_stay_the_users(run_python):
    run_python(
        """
        import torch
        import torch._dynamo
        import torch._functorch.config

        def settings():
            return [c.get_config_copy() for c in (torch._dynamo.config, torch._functorch.config)]

        before = settings()
        import torch_xla

        torch.compile(lambda x: x + 1, backend="openxla")(torch.ones(1, device="xla"))
        assert settings() == before
        """
    )


def test_a_graph_made_inside_a_full_graph_leaves_its_promise():
    """Nothing may be read until the end, also after a graph was made in between, which forbids it itself."""
    x = torch.arange(3.0).to("xla")
    torch_xla.sync()
    with torch_xla.compile(full_graph=True):
        y = compiled(lambda t: t * 2 + 1)(x) + 1
        with pytest.raises(RuntimeError, match="Unexpected execution"):
            y.tolist()
    assert y.tolist() == [2.0, 4.0, 6.0]
