"""Names around exported programs: sizes of other tensors, metadata as JSON, marks of composites."""

from __future__ import annotations

import json

import pytest
import torch

from torch_xla import stablehlo
from torch_xla.experimental import (
    stablehlo_custom_call,
    unbounded_dynamism_export,
    xla_dynamic_reshape_ops,
    xla_marker,
    xla_mlir_debuginfo,
)
from torch_xla.utils import stablehlo_test_utils


@pytest.mark.parametrize("device", ["cpu", "xla", "meta"])
def test_shapes_with_a_size_of_another_tensor(device):
    like = torch.empty(5, 2, device=device)
    one = torch.ones(1, 3, device=device)
    for expand in (
        xla_dynamic_reshape_ops.dynamic_expand,
        xla_dynamic_reshape_ops.dynamic_expand_xla,
    ):
        assert expand(one, [-1, 3], like, 0, 0).shape == (5, 3)
    flat = torch.arange(20.0, device=device)
    assert xla_dynamic_reshape_ops.dynamic_view(flat, [1, 2], like, 0, 0, 2).shape == (10, 2)


def test_which_programs_have_several_sizes():
    model = unbounded_dynamism_export.wrap_func_as_nn_module(lambda x: x * 2)
    batch = torch.export.Dim("batch")
    several = torch.export.export(model, (torch.ones(4, 2),), dynamic_shapes=(({0: batch},),))
    one = torch.export.export(model, (torch.ones(4, 2),))
    has = stablehlo.exported_program_has_symbolic_input_shape
    assert (has(several), has(one)) == (True, False)
    assert stablehlo.process_exported_program_with_symbolic_input(several) is several
    (node,) = (n for n in one.graph.nodes if n.op == "call_function")
    found = stablehlo.extract_custom_call_outputs_shape_dtype(node)
    assert found == ([torch.Size([4, 2])], [torch.float32])


def test_metadata_as_json():
    exported = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))
    meta = stablehlo.exported_program_to_stablehlo(exported)._bundle.stablehlo_funcs[0].meta
    text = json.dumps(meta, cls=stablehlo.StableHLOJSONSerializer)
    assert json.loads(text, object_hook=stablehlo.stablehlo_obj_hook) == meta
    with pytest.raises(TypeError, match="not JSON serializable"):
        json.dumps(object(), cls=stablehlo.StableHLOJSONSerializer)


def test_gradients_of_placed_values():
    gradient = torch.ones(2, device="xla")
    for backward in (
        stablehlo_custom_call.to_host_backward,
        stablehlo_custom_call.to_device_backward,
    ):
        assert backward(None, gradient).tolist() == [1.0, 1.0]


def test_composites_by_their_marks():
    attr = {"scale": 0.5, "dims": [1, 2], "name": "x"}
    pairs = xla_marker.serialize_composite_attr(attr)
    assert xla_marker.deserialize_composite_attr(pairs) == attr
    assert xla_marker.deserialize_composite_attr(None) is None
    with pytest.raises(ValueError, match="attributes are a dict"):
        xla_marker.serialize_composite_attr({"bad": object()})
    metadata = xla_marker.BoundaryMetadata("lib.f", 0, "7", False, attr)
    text = json.dumps(metadata, cls=xla_marker.BoundaryMetadataSerializer)
    assert json.loads(text) == {
        "name": "lib.f",
        "pos": 0,
        "id": "7",
        "is_input": False,
        "attr": attr,
    }

    def model(x):
        x = xla_marker.mark_tensor(x, "lib.f", 0, "7", True)
        return xla_marker.mark_tensor(torch.tanh(x) * 0.5, "lib.f", 0, "7", False, {"scale": 0.5})

    wrapped = stablehlo_test_utils.wrap_func_as_nn_module(model)
    given = torch.randn(3)
    exported = torch.export.export(wrapped, (given,))
    program = stablehlo.exported_program_to_stablehlo(exported)
    assert 'stablehlo.composite "lib.f"' in program.get_stablehlo_text()
    torch.testing.assert_close(torch.as_tensor(program(given)).cpu(), torch.tanh(given) * 0.5)


def test_what_exports_have_of_themselves():
    with pytest.raises(NotImplementedError, match="export_node_metadata=True"):
        xla_mlir_debuginfo.write_mlir_debuginfo(torch.ones(1), "{}")


def test_saved_models_need_tensorflow(tmp_path):
    model, given = torch.nn.Linear(2, 3), (torch.ones(1, 2),)
    exported = torch.export.export(model, given)
    compare = stablehlo_test_utils.compare_exported_program_and_saved_model_result
    if not stablehlo_test_utils.has_tf_package():
        with pytest.raises(ImportError, match="load_save_model_and_inference"):
            compare(exported, tmp_path, given)
        return
    from torch_xla import tf_saved_model_integration

    tf_saved_model_integration.save_torch_module_as_tf_saved_model(model, given, str(tmp_path))
    compare(exported, tmp_path, given, atol=1e-5)
