"""Tensors on ``xla`` as their users see them: made, moved, printed, read, copied, saved."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import torch_xla
import torch_xla.core.xla_model as xm
from xla_core.recording.xla_tensor import XLATensor


def same(x, expected):
    """``x`` is on xla and agrees with ``expected`` in dtype, shape and, to the bit, values."""
    assert x.device == torch.device("xla", 0)
    assert x.dtype == expected.dtype
    assert torch.equal(x.cpu(), expected)


# -- making -------------------------------------------------------------------------------------

FACTORIES = {
    "zeros": lambda device: torch.zeros(2, 3, device=device),
    "zeros int": lambda device: torch.zeros(3, dtype=torch.int32, device=device),
    "ones": lambda device: torch.ones(4, device=device),
    "full float": lambda device: torch.full((2, 2), 0.1, device=device),
    "full int": lambda device: torch.full((2,), 7, device=device),
    "full bool": lambda device: torch.full((2,), True, device=device),
    "arange": lambda device: torch.arange(5, device=device),
    "arange step": lambda device: torch.arange(1, 10, 3, device=device),
    "arange float": lambda device: torch.arange(0.0, 1.0, 0.25, device=device),
    "tensor floats": lambda device: torch.tensor([1.5, -2.0], device=device),
    "tensor ints": lambda device: torch.tensor([[1, 2], [3, 4]], device=device),
    "tensor bools": lambda device: torch.tensor([True, False], device=device),
    "tensor scalar": lambda device: torch.tensor(3.25, device=device),
    "tensor dtype": lambda device: torch.tensor([1, 2], dtype=torch.float64, device=device),
    "tensor complex": lambda device: torch.tensor([1 + 2j], device=device),
    "tensor of tensors": lambda device: torch.tensor(
        [torch.ones((), device=device), torch.zeros((), device=device)], device=device
    ),
    "tensor numpy": lambda device: torch.tensor(np.arange(3, dtype=np.int16), device=device),
    "as_tensor": lambda device: torch.as_tensor([1.0, 2.0], device=device),
    "empty of nothing": lambda device: torch.empty(0, 3, device=device),
    "eye": lambda device: torch.eye(3, 4, device=device),
    "linspace": lambda device: torch.linspace(0, 1, 5, device=device),
    "logspace": lambda device: torch.logspace(0, 2, 3, device=device),
    "scalar_tensor": lambda device: torch.scalar_tensor(2.5, device=device),
    "tril_indices": lambda device: torch.tril_indices(3, 3, device=device),
    "triu_indices": lambda device: torch.triu_indices(3, 3, device=device),
    "hann_window": lambda device: torch.hann_window(4, device=device),
    "kaiser_window": lambda device: torch.kaiser_window(5, False, 9.0, device=device),
    "kaiser_window periodic": lambda device: torch.kaiser_window(6, device=device),
    "kaiser_window of one": lambda device: torch.kaiser_window(1, device=device),
    "zeros_like": lambda device: torch.zeros_like(torch.ones(2, 2, device=device)),
    "ones_like dtype": lambda device: torch.ones_like(
        torch.ones(2, device=device), dtype=torch.int64
    ),
    "ones_like moved": lambda device: torch.ones_like(torch.zeros(2), device=device),
    "full_like": lambda device: torch.full_like(torch.ones(2, device=device), 2.5),
    "new_zeros": lambda device: torch.ones(2, device=device).new_zeros(3),
    "new_ones": lambda device: torch.ones(2, device=device).new_ones((1, 2)),
    "new_full": lambda device: torch.ones(2, device=device).new_full((2,), 1.5),
    "new_tensor": lambda device: torch.ones(2, device=device).new_tensor([1, 2]),
}


@pytest.mark.parametrize("device", ["xla", "xla:0", torch.device("xla"), xm.xla_device()], ids=repr)
@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
def test_factory_gives_what_the_cpu_gives(make, device):
    x = make(device)
    assert type(x) is XLATensor
    # linspace and windows are computed in another order of operations than the CPU's vector code.
    torch.testing.assert_close(x.cpu(), make("cpu"), rtol=1e-6, atol=1e-7)
    assert x.device == torch.device("xla", 0)
    assert x.is_xla and not x.is_cpu


def test_empty_has_shape_and_dtype():
    x = torch.empty(2, 3, dtype=torch.int16, device="xla")
    assert (x.shape, x.dtype, x.device.type) == ((2, 3), torch.int16, "xla")
    assert torch.empty_like(x, dtype=torch.float32).dtype is torch.float32
    assert x.new_empty(4).dtype is torch.int16
    assert torch.empty_strided((2, 3), (1, 2), device="xla").shape == (2, 3)


@pytest.mark.parametrize("make", ["randn", "rand"])
def test_random_factories_take_dtype_and_device(make):
    x = getattr(torch, make)(4, 5, device="xla", dtype=torch.float64)
    assert (x.shape, x.dtype, x.device.type) == ((4, 5), torch.float64, "xla")
    assert x.cpu().unique().numel() == 20


def test_integer_random_factories_stay_in_range():
    x = torch.randint(3, 7, (500,), device="xla").cpu()
    assert sorted(x.unique().tolist()) == [3, 4, 5, 6]
    assert torch.randperm(20, device="xla").cpu().sort().values.tolist() == list(range(20))


def test_default_device_context():
    with torch.device("xla"):
        x = torch.ones(2)
        layer = nn.Linear(2, 2)
    assert x.device.type == layer.weight.device.type == "xla"
    assert torch.ones(2).device.type == "cpu"


def test_negative_size_is_refused():
    with pytest.raises(RuntimeError, match="Trying to create tensor with negative dimension -1"):
        torch.empty(-1, device="xla")
    with pytest.raises(RuntimeError, match="Dimension size must be non-negative"):
        torch.zeros(-1, device="xla")


# -- moving -------------------------------------------------------------------------------------

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_to_the_device_and_back_keeps_every_bit(dtype):
    host = torch.tensor([0.0, -1.5, 2.25, 100.0]).to(dtype)
    x = host.to("xla")
    same(x, host)
    assert x.to("cpu").dtype is dtype
    assert torch.equal(x.clone().cpu(), host)


def test_views_and_strange_strides_arrive_as_they_look():
    host = torch.arange(24.0).view(2, 3, 4)
    for view in (
        host.transpose(0, 2),
        host[:, ::2],
        host[1],
        host.expand(2, 2, 3, 4),
        host.flip(0),
    ):
        same(view.to("xla"), view.contiguous())
    z = torch.tensor([1 + 2j, 3 - 1j])
    same(z.conj().to("xla"), z.conj().resolve_conj())
    same(z.imag.neg().to("xla"), -z.imag)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_changes_on_the_device(dtype):
    host = torch.tensor([0.0, 1.0, 3.0, 2.0])
    same(host.to("xla").to(dtype), host.to(dtype))
    same(host.to("xla", dtype), host.to(dtype))
    same(torch.zeros(4, dtype=dtype, device="xla").copy_(host), host.to(dtype))


def test_to_what_it_is_already_gives_the_tensor_itself():
    x = torch.ones(2, device="xla")
    assert x.to("xla") is x
    assert x.to("xla:0") is x
    assert x.to(torch.float32) is x
    copied = x.to("xla", copy=True)
    copied.add_(1)
    assert x.tolist() == [1, 1]


def test_shorthands_of_to():
    x = torch.tensor([1.5, 0.0], device="xla")
    for name in ("half", "double", "int", "long", "bool", "bfloat16", "char", "short", "byte"):
        same(getattr(x, name)(), getattr(x.cpu(), name)())
    assert x.type() == "torch.xla.FloatTensor"
    assert x.type(torch.float64).dtype is torch.float64
    assert x.type_as(torch.ones(1, dtype=torch.int32, device="xla")).dtype is torch.int32


def test_the_copy_on_the_cpu_is_independent():
    x = torch.zeros(3, device="xla")
    host = x.cpu()
    host.add_(1)
    x.sub_(1)
    assert host.tolist() == [1, 1, 1]
    assert x.tolist() == [-1, -1, -1]
    source = torch.zeros(3)
    y = source.to("xla")
    source.add_(5)
    assert y.tolist() == [0, 0, 0]


def test_copy_between_host_and_device_in_place():
    host = torch.arange(4.0)
    x = torch.zeros(2, 4, device="xla")
    x.copy_(host)  # broadcasts
    same(x, host.expand(2, 4).contiguous())
    x[1].copy_(host * 2)
    target = torch.zeros(2, 4, dtype=torch.int64)
    target.copy_(x)
    assert target.tolist() == [[0, 1, 2, 3], [0, 2, 4, 6]]


def test_modules_move_both_ways():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).eval()
    x = torch.randn(5, 3)
    expected = model(x)
    weight = model[0].weight
    moved = model.to(xm.xla_device())
    assert moved is model
    assert isinstance(model[0].weight, nn.Parameter)
    assert isinstance(weight, nn.Parameter)
    torch.testing.assert_close(model(x.to("xla")).cpu(), expected)
    assert {t.device.type for t in model.state_dict().values()} == {"xla"}
    model.cpu()
    torch.testing.assert_close(model(x), expected)
    assert {type(t) for t in model.state_dict().values()} == {torch.Tensor}


@pytest.mark.parametrize("device", ["cpu", "xla", "meta"])
def test_the_class_of_a_parameter_makes_parameters_as_accelerate_does_to_offload_models(device):
    weight = nn.Linear(2, 2).to("xla").weight
    made = type(weight)(torch.ones(2, 2, device=device), requires_grad=False)
    assert isinstance(made, nn.Parameter)
    assert (made.device.type, made.requires_grad) == (device, False)
    assert type(made) is type(weight) or device != "xla"


def test_the_class_of_a_tensor_makes_tensors_on_the_device_of_their_value():
    kind = type(torch.ones(2, device="xla"))
    value = torch.arange(3.0)
    assert type(kind(value)) is torch.Tensor
    assert torch.equal(kind(value), value)
    assert torch.equal(kind([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    assert kind(2, 3).shape == (2, 3)
    assert kind(value.to("xla")).tolist() == [0.0, 1.0, 2.0]
    assert kind(value.to("xla")).device.type == "xla"


def test_modules_are_built_on_the_device():
    layer = nn.Linear(30, 40, device="xla")
    assert layer.weight.device.type == "xla"
    bound = 1 / 30**0.5
    values = layer.weight.detach().cpu()
    assert -bound <= values.min() < -0.9 * bound
    assert 0.9 * bound < values.max() <= bound


# -- printing -----------------------------------------------------------------------------------

PRINTED = {
    "floats": (
        lambda: torch.tensor([1.0, 2.5], device="xla"),
        "tensor([1.0000, 2.5000], device='xla:0')",
    ),
    "ints": (lambda: torch.arange(3, device="xla"), "tensor([0, 1, 2], device='xla:0')"),
    "bools": (lambda: torch.tensor([True], device="xla"), "tensor([True], device='xla:0')"),
    "number": (lambda: torch.tensor(7, device="xla"), "tensor(7, device='xla:0')"),
    "empty": (lambda: torch.ones(0, device="xla"), "tensor([], device='xla:0')"),
    "empty 2-d": (
        lambda: torch.ones(2, 0, device="xla"),
        "tensor([], device='xla:0', size=(2, 0))",
    ),
    "dtype": (
        lambda: torch.ones(1, dtype=torch.int32, device="xla"),
        "tensor([1], device='xla:0', dtype=torch.int32)",
    ),
    "requires_grad": (
        lambda: torch.ones(1, device="xla", requires_grad=True),
        "tensor([1.], device='xla:0', requires_grad=True)",
    ),
    "grad_fn": (
        lambda: torch.ones(1, device="xla", requires_grad=True) * 2,
        "tensor([2.], device='xla:0', grad_fn=<MulBackward0>)",
    ),
    "Parameter": (
        lambda: nn.Parameter(torch.ones(1, device="xla")),
        "Parameter containing:\ntensor([1.], device='xla:0', requires_grad=True)",
    ),
    "view": (lambda: torch.arange(4, device="xla")[1::2], "tensor([1, 3], device='xla:0')"),
}


@pytest.mark.parametrize(("make", "text"), PRINTED.values(), ids=PRINTED)
def test_printing(make, text):
    assert repr(make()) == str(make()) == text


def test_long_tensors_are_printed_like_the_cpus():
    host = torch.arange(2000.0).view(40, 50) / 7
    expected = repr(host).removesuffix(")") + ", device='xla:0')"
    assert repr(host.to("xla")) == expected


def test_formatting_a_number():
    assert f"{torch.tensor(1.239, device='xla'):.2f}" == "1.24"
    assert f"{torch.tensor(3, device='xla'):03d} {torch.tensor(3, device='xla')}" == "003 3"
    assert f"{torch.ones(1, device='xla')}" == "tensor([1.], device='xla:0')"


# -- reading ------------------------------------------------------------------------------------


def test_numbers_come_out():
    assert torch.tensor([2.5], device="xla").item() == 2.5
    assert type(torch.tensor(2, device="xla").item()) is int
    assert type(torch.tensor(True, device="xla").item()) is bool
    assert torch.tensor([[1, 2], [3, 4]], device="xla").tolist() == [[1, 2], [3, 4]]
    assert torch.tensor(2.5, device="xla").tolist() == 2.5
    assert bool(torch.tensor([0.0], device="xla")) is False
    assert int(torch.tensor(3.9, device="xla")) == 3
    assert float(torch.tensor(3, device="xla")) == 3.0
    assert complex(torch.tensor(1 + 1j, device="xla")) == 1 + 1j
    assert len(torch.zeros(4, 2, device="xla")) == 4
    assert "abcd"[torch.tensor(2, device="xla")] == "c"
    assert 2 in torch.arange(3, device="xla")
    assert 5 not in torch.arange(3, device="xla")
    assert [x.item() for x in torch.arange(3, device="xla")] == [0, 1, 2]
    a, b = torch.arange(2, device="xla")
    assert (a.item(), b.item()) == (0, 1)


@pytest.mark.parametrize("read", [bool, int, float, len, torch.Tensor.item, list, iter], ids=repr)
@pytest.mark.parametrize("shape", [(), (0,), (3,)], ids=str)
def test_reading_what_is_no_number_fails_as_on_the_cpu(read, shape):
    host = torch.ones(shape)
    try:
        expected = read(host)
    except (RuntimeError, TypeError, ValueError) as error:
        with pytest.raises(type(error)) as caught:
            read(host.to("xla"))
        assert str(caught.value) == str(error)
    else:
        found = read(host.to("xla"))
        if read in (bool, int, float, len, torch.Tensor.item):
            assert found == expected
        else:
            assert len(list(found)) == len(list(expected))


@pytest.mark.parametrize(
    "convert", [lambda x: x.numpy(), np.array, np.asarray], ids=["m", "a", "as"]
)
def test_numpy_says_to_copy_to_the_cpu_first(convert):
    message = (
        r"can't convert xla:0 device type tensor to numpy. "
        r"Use Tensor.cpu\(\) to copy the tensor to host memory first."
    )
    with pytest.raises(TypeError, match=message):
        convert(torch.ones(2, device="xla"))


def test_numpy_by_force():
    x = torch.ones(2, device="xla", requires_grad=True)
    np.testing.assert_array_equal(x.numpy(force=True), [1, 1])


def test_layout_as_it_is_told():
    x = torch.zeros(2, 3, 4, device="xla")
    assert x.is_contiguous()
    assert x.stride() == (12, 4, 1)
    assert x.transpose(0, 1).is_contiguous()  # documented: xla tensors always look contiguous
    assert x.permute(2, 0, 1).view(-1).shape == (24,)
    assert (x.storage_offset(), x.element_size(), x.numel(), x.nbytes) == (0, 4, 24, 96)
    assert x.layout is torch.strided
    assert x.data_ptr() == x.untyped_storage().data_ptr() > 2**64  # no pointer to anything


def test_identity_in_containers():
    x, y = torch.ones(2, device="xla"), torch.ones(2, device="xla")
    assert {x: 1}[x] == 1
    assert len({x, y}) == 2
    assert isinstance(x, torch.Tensor)


# -- copying, pickling, saving --------------------------------------------------------------------


def test_deepcopy_of_tensors():
    x = torch.arange(3.0, device="xla", requires_grad=True)
    (x * x).sum().backward()
    x.note = [1, 2]
    y = copy.deepcopy(x)
    assert y.requires_grad and y.is_leaf
    assert y.grad.tolist() == [0, 2, 4]
    assert y.grad is not x.grad
    assert y.note == [1, 2] and y.note is not x.note
    with torch.no_grad():
        y.add_(1)
    assert x.tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(x * 2)


@pytest.mark.parametrize("device", ["xla", "cpu"])
def test_a_shallow_copy_has_the_same_storage(device):
    x = torch.arange(6.0, device=device).reshape(2, 3)
    whole, part = copy.copy(x), copy.copy(x[1:])
    whole.add_(1)
    part.zero_()
    assert x.tolist() == whole.tolist() == [[1, 2, 3], [0, 0, 0]]
    parameter = nn.Parameter(torch.ones(2, device=device))
    parameter.name_of_its_own = "a"
    copied = copy.copy(parameter)
    assert isinstance(copied, nn.Parameter) and copied.requires_grad and copied.is_leaf
    assert copied.name_of_its_own == "a"
    with torch.no_grad():
        copied.mul_(3)
    assert parameter.tolist() == [3, 3]
    # the copy of a result is a leaf
    copied = copy.copy(parameter * 2)
    assert copied.requires_grad and copied.is_leaf and copied.tolist() == [6, 6]
    assert not copy.copy(torch.ones(2, dtype=torch.int32, device=device)).requires_grad


def test_deepcopy_keeps_shared_parameters_shared():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to("xla")
    model[1].weight = model[0].weight
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight
    assert isinstance(twin[0].weight, nn.Parameter)
    assert twin[0].weight is not model[0].weight
    assert torch.equal(twin[0].weight, model[0].weight)
    assert len(list(twin.parameters())) == 3


def test_shallow_copy_shares_the_value():
    x = torch.zeros(2, device="xla")
    y = copy.copy(x)
    y.add_(1)
    assert y.tolist() == [1, 1]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(protocol):
    x = torch.arange(4.0, device="xla").view(2, 2)
    p = nn.Parameter(x.clone(), requires_grad=False)
    q = x.clone().requires_grad_()
    x2, p2, q2 = pickle.loads(pickle.dumps((x, p, q), protocol))
    same(x2, x.cpu())
    assert isinstance(p2, nn.Parameter) and not p2.requires_grad
    assert q2.requires_grad and q2.is_leaf and not isinstance(q2, nn.Parameter)


def saved(data):
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_save_and_load(weights_only, dtype):
    x = torch.tensor([[0.0, 1.0], [2.0, 5.0]]).to(dtype).to("xla")
    loaded = torch.load(saved({"x": x, "view": x[1]}), weights_only=weights_only)
    same(loaded["x"], x.cpu())
    same(loaded["view"], x[1].cpu())


@pytest.mark.parametrize("weights_only", [True, False])
def test_load_of_modules_and_optimizers(weights_only):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to("xla")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3, device="xla")).sum().backward()
    optimizer.step()
    file = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    found = torch.load(file, weights_only=weights_only)
    twin = nn.Linear(3, 2).to("xla")
    twin.load_state_dict(found["model"])
    assert torch.equal(twin.weight, model.weight)
    state = found["optimizer"]["state"][0]
    assert torch.equal(state["exp_avg"], optimizer.state[model.weight]["exp_avg"])


@pytest.mark.parametrize("map_location", ["cpu", torch.device("cpu"), {"xla:0": "cpu"}], ids=repr)
def test_load_onto_the_cpu(map_location):
    file = saved(nn.Linear(2, 2).to("xla").state_dict())
    loaded = torch.load(file, map_location=map_location)
    assert {t.device.type for t in loaded.values()} == {"cpu"}


def test_cpu_checkpoints_load_into_models_on_the_device():
    torch.manual_seed(0)
    source = nn.Linear(2, 2)
    target = nn.Linear(2, 2).to("xla")
    target.load_state_dict(torch.load(saved(source.state_dict())))
    same(target.weight.detach(), source.weight.detach())


def test_load_of_a_device_that_is_not_there_names_those_that_are(run_python, tmp_path):
    run_python(
        "import torch; torch.save(torch.ones(2, device='xla:2'), 'x.pt')", CPU_NUM_DEVICES="3"
    )
    with pytest.raises(RuntimeError, match="there is no device xla:2; this process has xla:0"):
        torch.load(tmp_path / "x.pt")


def test_weak_references_to_storages_tell_aliases_apart():
    """torch.multiprocessing's, which torch 2.11 asks of the arguments of compiled functions."""
    x, other = torch.zeros(4, device="xla"), torch.zeros(4, device="xla")
    mine, part = (StorageWeakRef(t.untyped_storage()) for t in (x, x[1:]))
    assert mine == part and hash(mine) == hash(part)
    assert mine != StorageWeakRef(other.untyped_storage())
    assert not mine.expired()
    torch_xla.sync()
    del x
    gc.collect()
    assert mine.expired()
