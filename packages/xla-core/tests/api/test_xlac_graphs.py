"""``_XLAC``: hashes, inputs and cached programs of graphs, lowering contexts, the builder's functions."""

from __future__ import annotations

import json

import pytest
import torch

import torch_xla
import torch_xla.core.xla_builder as xb
from torch_xla import _XLAC
from xla_core.support import counters


@pytest.fixture
def pair():
    return torch.arange(6.0).reshape(2, 3).to("xla"), torch.ones(3, 2).to("xla")


def test_a_hash_is_of_the_graph_alone(pair):
    a, b = pair
    alone = _XLAC._get_graph_hash([a @ b])
    other = b * 5  # what is pending besides, and lifted numbers, do not count
    assert _XLAC._get_graph_hash([a @ b]) == alone and len(alone) == 16
    assert _XLAC._get_graph_hash([a * 2.5]) == _XLAC._get_graph_hash([a * 3.5])
    assert _XLAC._get_graph_hash([a @ b]) != _XLAC._get_graph_hash([b @ a])
    assert _XLAC._get_graph_hash([a.sum(0)]) != _XLAC._get_graph_hash([a.sum(1)])
    assert other.tolist() == [[5.0, 5.0]] * 3


def test_a_graph_runs_again_on_other_inputs(pair, compile_count):
    a, b = pair
    unrelated = torch.ones(7, device="xla") * 4
    x, y = a @ b, a.sum() * 2.5
    ids, inputs = _XLAC._get_tensors_xla_device_data_node([x, y])
    assert ids == [_XLAC._xla_get_tensor_id(a), _XLAC._xla_get_tensor_id(b)]
    assert torch.equal(inputs[0].cpu(), a.cpu()) and _XLAC._get_tensors_handle(inputs[:1]) == (
        _XLAC._get_tensors_handle([a])
    )
    x, y = a @ b, a.sum() * 2.5  # reading the inputs ran what was pending
    same = _XLAC._get_tensors_xla_device_data_node([x, y], [a])[1]
    assert same[0] is a and same[1] is not b
    key = _XLAC._get_graph_hash([x, y])
    _XLAC._xla_warm_up_cache([x, y], [])
    assert _XLAC._check_tensor_need_materialization([x, y]) == [True, True]
    before = compile_count()
    fresh = torch.full((2, 3), 2.0), torch.randn(3, 2)
    got = _XLAC._run_cached_graph(key, [t.to("xla") for t in fresh])
    torch.testing.assert_close(got[0].cpu(), fresh[0] @ fresh[1])
    torch.testing.assert_close(got[1].cpu(), fresh[0].sum() * 2.5)
    assert compile_count() == before
    assert counters.all_metrics()["RunCachedGraphInputData"].total >= 1
    assert x.tolist() == (a.cpu() @ b.cpu()).tolist() and unrelated.sum().item() == 28
    with pytest.raises(RuntimeError, match="has 2 inputs, got 1"):
        _XLAC._run_cached_graph(key, [a])
    with pytest.raises(RuntimeError, match="input 1 of the graph"):
        _XLAC._run_cached_graph(key, [a, a])
    with pytest.raises(RuntimeError, match="_xla_warm_up_cache"):
        _XLAC._run_cached_graph(b"0" * 16, [])


def test_a_graph_that_runs_again_draws_new_random_numbers():
    x = torch.zeros(8).to("xla")
    y = x + torch.rand(8, device="xla")
    key = _XLAC._get_graph_hash([y])
    _XLAC._xla_warm_up_cache([y])
    first, second = (_XLAC._run_cached_graph(key, [x])[0].cpu() for _ in range(2))
    assert not torch.equal(first, second) and first.min() >= 0 and first.max() < 1


def test_an_overwritten_input_of_a_graph_that_runs_again_stays(pair):
    a, _ = pair
    a.add_(1)
    key = _XLAC._get_graph_hash([a])
    _XLAC._xla_warm_up_cache([a])
    given = torch.zeros(2, 3, device="xla") + 3
    torch_xla.sync()
    assert _XLAC._run_cached_graph(key, [given])[0].tolist() == [[4.0] * 3] * 2
    assert given.tolist() == [[3.0] * 3] * 2


def test_pending_work_can_be_forgotten(pair):
    a, _ = pair
    torch_xla.sync()
    b, done = a * 2, a.clone()
    torch_xla.sync()
    c = b + 1
    assert _XLAC._check_device_tensor_need_materialization("xla:0").count(True) == 1
    _XLAC._clear_pending_irs("xla:0")
    assert _XLAC._is_placecholder(c) and not _XLAC._is_placecholder(b)
    torch_xla.sync()
    assert torch.equal(b.cpu(), done.cpu() * 2)
    with pytest.raises(RuntimeError, match="no value"):
        c.cpu()


def test_handles_and_ids(pair):
    a, b = pair
    one, two = _XLAC._get_tensors_handle([a, b])
    assert one != two and _XLAC._get_tensors_handle([a.detach()]) == [one]
    assert _XLAC._xla_get_tensor_view_alias_id(a) == _XLAC._xla_get_tensor_view_alias_id(a[0])
    assert _XLAC._xla_get_tensor_view_alias_id(a) != _XLAC._xla_get_tensor_view_alias_id(b)
    c = a + 1
    pending = _XLAC._unique_id_for_ir_and_data(c)
    assert pending.startswith("ir:") and _XLAC._unique_id_for_ir_and_data(c.detach()) == pending
    _XLAC._xla_sync_live_tensors("xla:0", [], True)
    assert _XLAC._unique_id_for_ir_and_data(c).startswith("data:")


def test_tensors_that_were_never_written_have_ids_of_their_own():
    a, b = torch.empty(2, device="xla"), torch.empty(3, device="xla")
    assert _XLAC._unique_id_for_ir_and_data(a) != _XLAC._unique_id_for_ir_and_data(b)
    assert _XLAC._unique_id_for_ir_and_data(a) == _XLAC._unique_id_for_ir_and_data(a.detach())


def test_stablehlo_comes_out_and_goes_in(pair):
    a, b = pair
    text = _XLAC._get_stablehlo([a @ b], "xla:0", [], False)
    assert b"stablehlo.dot_general" in text
    code = _XLAC._get_stablehlo([a @ b], "xla:0", [], True)
    (result,) = _XLAC._run_stablehlo(code, [a + 1, b])
    assert torch.equal(result.cpu(), (a.cpu() + 1) @ b.cpu())
    proto = _XLAC._get_xla_tensors_hlo_proto([a @ b])
    again = _XLAC._xla_op_computation_from_module_proto("again", proto)
    assert "dot(" in _XLAC._xla_computation_text(again)
    with pytest.raises(TypeError, match="xla tensors"):
        _XLAC._get_stablehlo([torch.ones(2)], "", [], True)


def test_sessions_limit_the_graphs_of_a_function():
    _XLAC._dynamic_shape_detector_set_max_different_graphs(1)
    assert _XLAC._dynamic_shape_detector_get_max_different_graphs() == 1

    def call(size):
        _XLAC._dynamic_shape_detector_start_session("double")
        result = torch.ones(size, device="xla") * 2
        _XLAC._dynamic_shape_detector_end_session()
        return result.sum().item()

    assert [call(3), call(3)] == [6.0, 6.0]
    with pytest.raises(RuntimeError, match="Maximum number of different graphs"):
        call(4)
    torch_xla.sync()
    _XLAC._dynamic_shape_detector_remove_session("double")
    assert call(4) == 8.0
    _XLAC._dynamic_shape_detector_remove_session("double")
    with pytest.raises(KeyError):
        _XLAC._dynamic_shape_detector_remove_session("double")
    with pytest.raises(RuntimeError, match="no session is open"):
        _XLAC._dynamic_shape_detector_end_session()
    with pytest.raises(ValueError, match="at least 1"):
        _XLAC._dynamic_shape_detector_set_max_different_graphs(0)


# -- lowering contexts ---------------------------------------------------------------------------


def test_a_lowering_context_holds_the_program_and_its_arguments(pair):
    a, b = pair
    unrelated = torch.ones(7).to("xla") + 1
    context = _XLAC.lowering.LoweringContext("MyName")
    with pytest.raises(RuntimeError, match="call build"):
        context.hlo()
    result = a @ b
    context.build([result])
    assert context.get_name_string() == "MyName" and "HloModule MyName" in context.hlo_text()
    assert "f32[7]" not in context.hlo_text()
    values = context.parameter_id_tensor_mapping()
    assert sorted(values) == [0, 1] and values[0].device.type == "cpu"
    assert torch.equal(values[context.tensor_parameter_id(a)], a.cpu())
    assert torch.equal(values[context.tensor_parameter_id(b)], b.cpu())
    assert context.tensor_parameter_id(torch.ones(2, device="xla")) == -1
    on_device = context.device_parameter_id_tensor_mapping()
    assert {t.device.type for t in on_device.values()} == {"xla"}
    module = json.loads(context.hlo_json())
    assert len(module["hostProgramShape"]["parameters"]) == 2
    opcodes = {i["opcode"] for c in module["computations"] for i in c["instructions"]}
    assert {"parameter", "dot"} <= opcodes
    assert unrelated.sum().item() == 14


def test_an_hlo_proto_computes_what_the_graph_does(pair):
    a, b = pair
    context = _XLAC.lowering.LoweringContext()
    context.build([(a @ b) * 3.5, a + 1])
    computation = xb.computation_from_module_proto("taken", context.hlo())
    arguments = [t for _, t in sorted(context.device_parameter_id_tensor_mapping().items())]
    assert len(arguments) == 3  # the vector of numbers is the last
    first, second = xb.xla_computation_as_func(computation)(arguments)
    torch.testing.assert_close(first.cpu(), (a.cpu() @ b.cpu()) * 3.5)
    torch.testing.assert_close(second.cpu(), a.cpu() + 1)
    context.set_name_string("again")
    context.build([a])
    assert "HloModule again" in context.hlo_text()
    with pytest.raises(NotImplementedError, match="while_loop"):
        context.buildforiloop([a])
    with pytest.raises(TypeError, match="xla device"):
        context.build([torch.ones(1)])


# -- the builder ---------------------------------------------------------------------------------


def test_computations_without_wrappers(pair):
    a, _ = pair
    shape = _XLAC._xla_op_tensor_shape(a, "xla:0")
    assert shape["type"] == "f32" and tuple(shape["sizes"]) == (2, 3)
    builder = _XLAC._xla_op_create_builder("twice")
    x = _XLAC._xla_op_param(builder, 0, shape)
    root = _XLAC._xla_op_create(builder, "Add", [x, x], {})
    assert isinstance(root, _XLAC.XlaOp) and isinstance(builder, _XLAC.XlaBuilder)
    assert _XLAC._xla_op_builder(root) is builder
    assert tuple(_XLAC._xla_op_shape(root)["sizes"]) == (2, 3)
    computation = _XLAC._xla_op_build("twice", root)
    assert isinstance(computation, _XLAC.XlaComputation)
    assert "add(" in _XLAC._xla_computation_text(computation)
    (result,) = _XLAC._xla_user_computation("xla::twice", [a], computation)
    assert torch.equal(result.cpu(), a.cpu() * 2)
    made = _XLAC._xla_create_placeholder_tensor({"type": "s32", "sizes": (4,)})
    assert _XLAC._is_placecholder(made) and (made.dtype, tuple(made.shape)) == (torch.int32, (4,))
    with pytest.raises(RuntimeError):
        _XLAC._xla_op_create(builder, "Frobnicate", [x], {})
