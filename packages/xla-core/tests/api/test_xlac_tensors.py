"""``_XLAC``: devices and processes, settings, single tensors; values against PyTorch on the CPU."""

from __future__ import annotations

import ctypes
import importlib
import json

import pytest
import torch

import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla import _XLAC
from xla_core.support import counters


@pytest.fixture
def numbers_as_constants():
    _XLAC._set_xla_all_numbers_special_scalars(True)
    yield
    _XLAC._set_xla_all_numbers_special_scalars(False)


def test_the_module_has_the_name_of_the_wheels_too():
    assert importlib.import_module("_XLAC") is _XLAC


def test_devices_and_processes():
    assert _XLAC._xla_get_all_devices() == ["CPU:0"] == _XLAC._xla_get_runtime_devices()
    assert _XLAC._xla_get_all_runtime_devices() == torch_xla.real_devices()
    counts = (
        _XLAC._xla_num_devices(), _XLAC._xla_num_global_devices(), _XLAC._xla_num_runtime_devices(),
        _XLAC._xla_get_num_processes(),
    )  # fmt: skip
    assert counts == (1, 1, 1, 1) and _XLAC._xla_get_process_index() == 0
    assert _XLAC._xla_get_device_ordinal("xla:0") == 0 == _XLAC._xla_get_device_ordinal("CPU:0")
    assert _XLAC._xla_set_default_device("xla:0") == "xla:0"
    assert _XLAC._xla_get_default_device_ordinal() == 0
    with pytest.raises(RuntimeError, match="no device xla:7"):
        _XLAC._xla_set_default_device("xla:7")
    assert _XLAC._xla_get_device_hw_type(torch.ones(1, device="xla")) == "CPU"
    with pytest.raises(RuntimeError, match="not an XLA tensor"):
        _XLAC._xla_get_device_hw_type(torch.ones(1))
    assert _XLAC._xla_get_device_attributes("CPU:0")["name"] == "CPU:0"
    assert [a["name"] for a in _XLAC._xla_get_all_device_attributes()] == ["CPU:0"]
    held = torch.ones(1000).to("xla")
    found, expected = _XLAC._xla_memory_info("xla:0"), xm.get_memory_info("xla:0")
    # other tests' values may be freed between the two
    assert found.keys() == expected.keys() and found["bytes_limit"] == expected["bytes_limit"]
    assert min(found["bytes_used"], expected["bytes_used"]) >= held.nbytes
    assert "jaxlib" in _XLAC._xla_get_platform_version()
    assert _XLAC._xla_get_num_cached_compilation_graph() >= 0
    assert _XLAC._xla_get_spmd_config_is_locked()
    with pytest.raises(RuntimeError, match="use_spmd"):
        _XLAC._xla_force_spmd_device()
    assert _XLAC._get_git_revs()["torch"] == torch.version.git_version
    _XLAC._prepare_to_exit()


def test_random_states():
    _XLAC._xla_set_rng_seed(7, "xla:0")
    assert _XLAC._xla_get_rng_seed() == 7 == xm.get_rng_state()
    seed = _XLAC._get_base_seed_as_tensor("xla:0")
    assert (seed.item(), seed.dtype, seed.device.type) == (7, torch.int64, "xla")
    first = torch.rand(3, device="xla").cpu()
    _XLAC._xla_set_rng_seed(7)
    assert torch.equal(torch.rand(3, device="xla").cpu(), first)
    assert _XLAC._get_seed_info_id() == -127389


def test_replicas_are_set_by_their_runtime_names():
    assert _XLAC._xla_get_replication_devices() == []
    _XLAC._xla_set_replication_devices(["CPU:0"])
    try:
        assert _XLAC._xla_get_replication_devices() == ["CPU:0"]
        assert _XLAC._xla_get_replication_devices_count() == 1
    finally:
        _XLAC._xla_set_replication_devices([])
    assert _XLAC._xla_get_replication_devices_count() == 0


def test_all_numbers_can_be_constants_of_the_program(numbers_as_constants, compile_count):
    assert _XLAC._get_xla_all_numbers_special_scalars()
    x = torch.arange(3.0).to("xla")
    text = xm.get_stablehlo([x * 2.5 + 7])
    assert "2.500000e+00" in text and "7.000000e+00" in text and "tensor<1xf64>" not in text
    torch_xla.sync()
    before = compile_count()
    for factor in (2.5, 3.5):
        assert (x * factor).tolist() == [0.0, factor, 2 * factor]
    assert compile_count() == before + 2
    _XLAC._set_xla_all_numbers_special_scalars(False)
    assert "tensor<1xf64>" in xm.get_stablehlo([x * 2.5])
    torch_xla.sync()
    for factor in (4.5, 5.5):
        assert (x * factor).tolist() == [0.0, factor, 2 * factor]
    assert compile_count() == before + 3


def test_seeds_are_arguments_even_then(numbers_as_constants, compile_count):
    first = torch.rand(4, device="xla").cpu()
    before = compile_count()
    assert not torch.equal(torch.rand(4, device="xla").cpu(), first)
    assert compile_count() == before


def test_zero_and_one_are_constants_always():
    assert _XLAC._get_xla_handle_special_scalars()
    _XLAC._set_xla_handle_special_scalars(True)
    with pytest.raises(NotImplementedError, match="_set_xla_all_numbers_special_scalars"):
        _XLAC._set_xla_handle_special_scalars(False)


def uploads():
    return counters.all_metrics()["TransferToDeviceTime"].total


def test_numbers_may_stay_on_the_device():
    x = torch.ones(2).to("xla")

    def uploads_of_a_step():
        before = uploads()
        assert (x * 1.234567).sum().item() == pytest.approx(2.469134)
        return uploads() - before

    assert not _XLAC._get_xla_enable_device_data_cache()
    assert [uploads_of_a_step() for _ in range(2)] == [1, 1]
    _XLAC._set_xla_enable_device_data_cache(True)
    try:
        assert _XLAC._get_xla_enable_device_data_cache()
        assert [uploads_of_a_step() for _ in range(3)] == [1, 0, 0]
    finally:
        _XLAC._set_xla_enable_device_data_cache(False)
    assert uploads_of_a_step() == 1


def test_execution_may_be_forbidden():
    x = torch.ones(2, device="xla") + 1
    _XLAC._set_allow_execution(False)
    try:
        assert not _XLAC._get_allow_execution()
        with pytest.raises(RuntimeError, match="Unexpected execution happens inside the compiled"):
            torch_xla.sync()
        with pytest.raises(RuntimeError, match="Unexpected execution"):
            x.cpu()
    finally:
        _XLAC._set_allow_execution(True)
    assert _XLAC._get_allow_execution() and x.tolist() == [2.0, 2.0]


def test_graph_names_eager_mode_and_donors():
    _XLAC._set_current_graph_name("training")
    assert _XLAC._get_current_graph_name() == "training"
    assert "@training" in xm.get_stablehlo([torch.ones(2, device="xla") + 2])
    _XLAC._set_current_graph_name("")
    assert _XLAC._get_current_graph_name() == ""
    _XLAC._set_use_eager_mode(True)
    try:
        x = torch.ones(2, device="xla") * 3
        assert _XLAC._get_use_eager_mode()
        assert _XLAC._check_tensor_need_materialization([x]) == [False]
    finally:
        _XLAC._set_use_eager_mode(False)
    assert not _XLAC._xla_get_enable_alias_with_buffer_donor_config()
    _XLAC._xla_set_enable_alias_with_buffer_donor_config(True)
    try:
        assert _XLAC._xla_get_enable_alias_with_buffer_donor_config()
        y = torch.arange(4.0).to("xla")
        _XLAC._set_buffer_donation(y, True)
        z = y + 1
        torch_xla.sync()
        assert z.tolist() == [1.0, 2.0, 3.0, 4.0]
        with pytest.raises(RuntimeError, match="donated"):
            y.cpu()
    finally:
        _XLAC._xla_set_enable_alias_with_buffer_donor_config(False)


def test_operations_get_names_of_their_own(run_python):
    output = run_python("""
        import torch, torch_xla
        from torch_xla import _XLAC
        x = torch.ones(3).to("xla")
        y = x.tanh()
        assert _XLAC._set_xla_custom_op_name_prefix(y, "model/layer0/", 0)
        assert not _XLAC._set_xla_custom_op_name_prefix(x, "model", 0)
        assert not _XLAC._set_xla_custom_op_name_prefix(torch.ones(1), "model", 0)
        context = _XLAC.lowering.LoweringContext("named")
        context.build([y])
        print(context.hlo_text())
    """)
    assert "named/model/layer0/aten.tanh.default" in output


def test_transfers_and_replacement():
    cpu = [torch.arange(3.0, requires_grad=True), torch.ones(2, dtype=torch.int32)]
    a, b = _XLAC._xla_tensors_from_aten(cpu, ["xla:0", "xla:0"])
    assert a.requires_grad and a.is_leaf and not b.requires_grad and b.dtype is torch.int32
    back = _XLAC._xla_get_cpu_tensors([a, b])
    assert all(torch.equal(x, y) for x, y in zip(back, cpu, strict=True)) and back[0].requires_grad
    with pytest.raises(RuntimeError, match="one of each"):
        _XLAC._xla_tensors_from_aten(cpu, ["xla:0"])
    view = b[1:]
    assert _XLAC._replace_xla_tensor(b, torch.tensor([5, 6], dtype=torch.int32).to("xla")) is b
    assert b.tolist() == [5, 6] and view.tolist() == [6]
    with pytest.raises(RuntimeError, match="cannot replace one of shape"):
        _XLAC._replace_xla_tensor(b, a.detach())
    assert _XLAC._get_xla_tensor_shape_type(a.to(torch.float16)) == "f16"
    assert _XLAC._get_xla_tensor_shape_type(b) == "s32"
    assert torch.equal(_XLAC._from_dlpack(_XLAC._to_dlpack(a.detach())).cpu(), cpu[0])
    c = a.detach() * 2
    _XLAC._xla_optimization_barrier_([c])
    assert "optimization_barrier" in xm.get_stablehlo([c]) and c.tolist() == [0.0, 2.0, 4.0]


def test_dot_general():
    lhs, rhs = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    numbers = (([2], [1]), ([0], [0]))
    result = _XLAC._xla_dot_general(lhs.to("xla"), rhs.to("xla"), numbers)
    torch.testing.assert_close(result.cpu(), lhs @ rhs)
    negative = _XLAC._xla_dot_general(
        lhs.to("xla"), rhs.to("xla"), (([-1], [-2]), ([0], [-3])), precision_config="HIGHEST"
    )
    torch.testing.assert_close(negative.cpu(), lhs @ rhs)
    a, b = (
        torch.randint(-128, 127, (4, 64), dtype=torch.int8),
        torch.full((64, 2), 127, dtype=torch.int8),
    )
    wide = _XLAC._xla_dot_general(
        a.to("xla"), b.to("xla"), (([1], [0]), ([], [])), preferred_element_type=torch.int32
    )
    assert wide.dtype is torch.int32 and torch.equal(wide.cpu(), a.int() @ b.int())
    with pytest.raises(RuntimeError, match="xla device"):
        _XLAC._xla_dot_general(lhs, rhs, numbers)
    with pytest.raises(ValueError, match="another size"):
        _XLAC._xla_dot_general(lhs.to("xla"), rhs.to("xla"), (([1], [1]), ([0], [0])))
    with pytest.raises(ValueError, match="HIGHEST"):
        _XLAC._xla_dot_general(lhs.to("xla"), rhs.to("xla"), numbers, "best")


def test_quantized_values():
    x = torch.randn(4, 3)
    scales, zeros = [0.1, 0.05, 0.2], [0, 3, -2]
    got = _XLAC._xla_quantize_tensor(x.to("xla"), scales, zeros, -128, 127, "int8", 1)
    whole = (x / torch.tensor(scales)).round() + torch.tensor(zeros)
    assert got.dtype is torch.int8
    assert torch.equal(got.cpu(), whole.clamp(-128, 127).to(torch.int8))
    back = _XLAC._xla_dequantize_tensor(got, scales, zeros, -128, 127, "torch.int8", 1)
    arguments = (torch.tensor(scales), torch.tensor(zeros, dtype=torch.int32), 1, -128, 127)
    torch.testing.assert_close(back.cpu(), torch.fake_quantize_per_channel_affine(x, *arguments))
    one = _XLAC._xla_quantize_tensor(x.to("xla"), [0.02], [10], 0, 255, "uint8", -1)
    assert torch.equal(one.cpu(), ((x / 0.02).round() + 10).clamp(0, 255).to(torch.uint8))
    with pytest.raises(ValueError, match="one of each"):
        _XLAC._xla_quantize_tensor(x.to("xla"), [0.1], [0], -128, 127, "int8", 1)
    with pytest.raises(ValueError, match="int8"):
        _XLAC._xla_quantize_tensor(x.to("xla"), [0.1], [0], -128, 127, "float32", -1)
    four = _XLAC._xla_cast_int4(torch.zeros(2, 2, device="xla"), [-8, 7, 0, 1])
    assert four.tolist() == [[-8, 7], [0, 1]] and four.device.type == "xla"
    with pytest.raises(ValueError, match="-8 to 7"):
        _XLAC._xla_cast_int4(torch.zeros(1, device="xla"), [8])


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize(
    ("amsgrad", "maximize", "adamw"), [(False, False, False), (True, True, True)]
)
def test_adams_step(found, amsgrad, maximize, adamw):
    torch.manual_seed(1)
    param = torch.nn.Parameter(torch.randn(5))
    kind = torch.optim.AdamW if adamw else torch.optim.Adam
    optimizer = kind([param], lr=0.1, weight_decay=0.01, amsgrad=amsgrad, maximize=maximize)
    p = param.detach().to("xla")
    step, m, v, most = (torch.zeros(n, device="xla") for n in ((), 5, 5, 5))
    before = p.cpu()
    for _ in range(3):
        param.grad = torch.randn(5)
        optimizer.step()
        _XLAC._xla_adam_optimizer_step_(
            torch.tensor(found).to("xla"), step, p, param.grad.to("xla"), m, v, most,
            0.9, 0.999, 0.1, 0.01, 1e-8, amsgrad, maximize, adamw,
        )  # fmt: skip
        torch_xla.sync()
    if found:
        assert torch.equal(p.cpu(), before) and step.item() == 0 and not m.any()
    else:
        torch.testing.assert_close(p.cpu(), param.detach())
        assert step.item() == 3


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov", "maximize"),
    [(0.0, 0.0, False, False), (0.9, 0.1, False, True), (0.9, 0.0, True, False)],
)
def test_sgds_step(found, momentum, dampening, nesterov, maximize):
    torch.manual_seed(1)
    param = torch.nn.Parameter(torch.randn(5))
    optimizer = torch.optim.SGD(
        [param], lr=0.1, weight_decay=0.01, momentum=momentum, dampening=dampening,
        nesterov=nesterov, maximize=maximize,
    )  # fmt: skip
    p = param.detach().to("xla")
    step, buf = torch.zeros((), device="xla"), torch.zeros(5, device="xla")
    before = p.cpu()
    for _ in range(3):
        param.grad = torch.randn(5)
        optimizer.step()
        _XLAC._xla_sgd_optimizer_step_(
            torch.tensor(found).to("xla"), step, p, buf, param.grad.to("xla"),
            0.01, momentum, 0.1, dampening, nesterov, maximize,
        )  # fmt: skip
    if found:
        assert torch.equal(p.cpu(), before) and step.item() == 0
    else:
        torch.testing.assert_close(p.cpu(), param.detach())
        assert step.item() == 3


def test_sizes_from_another_tensor():
    x, src = torch.arange(3.0).reshape(1, 3).to("xla"), torch.zeros(4, 2, device="xla")
    grown = _XLAC._xla_dynamic_expand(x, [1, 3], src, 0, 0)
    assert torch.equal(grown.cpu(), torch.arange(3.0).expand(4, 3))
    y = torch.arange(8.0).to("xla")
    viewed = _XLAC._xla_dynamic_view(y, [0, 4], src, 1, 0, 1.0)
    assert torch.equal(viewed.cpu(), torch.arange(8.0).view(2, 4))


def test_marks_of_composites_as_json():
    def mark(t, pos, is_input, attr=None):
        said = {"name": "acme.scale", "id": "0", "pos": pos, "is_input": is_input, "attr": attr}
        return _XLAC._xla_mark_tensor(t, json.dumps(said))

    x = torch.arange(3.0).to("xla")
    y = mark(mark(x, 0, True) * 2, 0, False, {"factor": 2})
    text = xm.get_stablehlo([y])
    assert 'stablehlo.composite "acme.scale"' in text and "factor = 2" in text
    assert y.tolist() == [0.0, 2.0, 4.0]
    with pytest.raises(RuntimeError, match="does not describe"):
        _XLAC._xla_mark_tensor(x, "{}")


def test_custom_call_targets():
    kind = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_float), ctypes.POINTER(ctypes.c_void_p))

    def triple(result, operands):
        values = ctypes.cast(operands[0], ctypes.POINTER(ctypes.c_float))
        for i in range(4):
            result[i] = 3 * values[i]

    test_custom_call_targets.kept = kind(triple)  # as long as the process
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    address = ctypes.cast(test_custom_call_targets.kept, ctypes.c_void_p)
    capsule = make(address, b"xla._CUSTOM_CALL_TARGET", None)
    _XLAC._xla_register_custom_call_target("acme_triple", capsule, "CPU")
    x = torch.arange(4.0).to("xla")
    (result,) = _XLAC._xla_custom_call([x], "acme_triple", [[4]], [torch.float32], False, "", 1, {})
    assert result.tolist() == [0.0, 3.0, 6.0, 9.0]
