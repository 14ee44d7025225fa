"""Every way to the host: strides, storage and bytes are those that the ``xla`` tensor says it has."""

from __future__ import annotations

import copy
import ctypes
import io
import multiprocessing
import pickle
import random

import pytest
import torch
import torch.multiprocessing.reductions
from torch.utils import dlpack as torch_dlpack

import torch_xla.core.xla_model as xm
import torch_xla.utils.dlpack as xla_dlpack
import torch_xla.utils.serialization as xser

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.float8_e5m2,
    torch.complex64,
)

# Names of what a chain does to a tensor, each from a tensor and two numbers that choose.
STEPS = {
    "transpose": lambda x, i, j: x.transpose(i % x.dim(), j % x.dim()),
    "permute": lambda x, i, j: x.permute(*reversed(range(x.dim()))),
    "contiguous": lambda x, i, j: x.contiguous(),
    "channels_last": lambda x, i, j: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "narrow": lambda x, i, j: x.narrow(i % x.dim(), 0, min(j, x.shape[i % x.dim()])),
    "step": lambda x, i, j: x[:: 1 + j],
    "unsqueeze": lambda x, i, j: x.unsqueeze(i % (x.dim() + 1)),
    "expand": lambda x, i, j: x.unsqueeze(0).expand(1 + j, *x.shape),
    "flatten": lambda x, i, j: x.flatten(),
    "reshape": lambda x, i, j: x.reshape(x.shape[::-1]),
    "swap_in_place": lambda x, i, j: x.clone().transpose_(i % x.dim(), j % x.dim()),
    "conj": lambda x, i, j: x.conj(),
    "clone": lambda x, i, j: x.clone(),
    "clone_channels_last": lambda x, i, j: x.clone(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "flip": lambda x, i, j: x.flip(i % x.dim()),
    "diagonal": lambda x, i, j: x.diagonal() if x.dim() > 1 else x,
    "detach": lambda x, i, j: x.detach(),
}  # fmt: skip


def chain_of(seed, dtypes=DTYPES):
    """A shape, a dtype and up to five steps, chosen by ``seed``."""
    choose = random.Random(seed)
    shape = [choose.choice((0, 1, 2, 3, 4)) for _ in range(choose.randint(1, 4))]
    steps = [
        (choose.choice(sorted(STEPS)), choose.randint(0, 3), choose.randint(0, 3))
        for _ in range(choose.randint(0, 5))
    ]
    return shape, choose.choice(dtypes), steps


def apply(x, steps):
    """What a chain of steps makes of ``x``, without the steps that do not fit it."""
    for name, i, j in steps:
        if x.dim() == 0 or x.dim() > 5:
            break
        x = STEPS[name](x, i, j)
    return x


def values(shape, dtype):
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float32).reshape(shape).to(dtype)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def bits(x):
    """The values in order, as bytes."""
    return bytes(x.resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist())


def memory(x):
    """The bytes of a CPU tensor as they lie, which is what writers of files take."""
    return ctypes.string_at(x.data_ptr(), x.nbytes) if x.nbytes else b""


def through_pickle(x):
    if x.dtype is torch.float8_e5m2:
        return x.cpu()  # torch 2.13 cannot unpickle such a CPU tensor either
    return pickle.loads(pickle.dumps(x)).cpu()


def through_file(save):
    def go(x):
        file = io.BytesIO()
        save({"x": x}, file)
        file.seek(0)
        return torch.load(file, map_location="cpu")["x"]

    return go


def through_safetensors(x):
    if x.dtype in (torch.complex64, torch.float8_e5m2):
        return x.cpu()  # versions of safetensors differ in whether they know these
    return safetensors.load(safetensors.save({"x": x}))["x"]


def into_new(x):
    target = torch.empty(x.shape, dtype=x.dtype)
    target.copy_(x)
    return target


def through_shared_memory(x):
    """What a multiprocessing queue does: it pickles with torch's own reductions."""
    return pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(x)).cpu()


WAYS = {
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to with dtype": lambda x: x.to(device="cpu", dtype=x.dtype, copy=True),
    "data": lambda x: x.data.cpu(),
    "copy_": into_new,
    "pickle": through_pickle,
    "torch.save": through_file(torch.save),
    "xm.save": through_file(xm.save),
    "xser.save": through_file(xser.save),
    "safetensors": through_safetensors,
    "queue": through_shared_memory,
}


@pytest.mark.parametrize("seed", range(24))
def test_the_host_sees_what_the_tensor_claims(seed):
    shape, dtype, steps = chain_of(seed)
    host = values(shape, dtype)
    expected = apply(host, steps)
    x = apply(host.to("xla"), steps)
    assert x.is_contiguous()
    for name, way in WAYS.items():
        got = way(x)
        assert same_bits(got, expected), name
        assert got.stride() == x.stride(), name
        assert got.is_contiguous(), name
        assert not got.is_conj(), name
        assert got.storage_offset() == x.storage_offset() == 0, name
        assert got.untyped_storage().nbytes() == got.nbytes, name
        assert memory(got) == bits(expected), name


@pytest.mark.parametrize("seed", range(100, 112))
def test_numbers_and_arrays_are_those_of_the_tensor(seed):
    # numpy has no bfloat16, nor eight bits
    shape, dtype, steps = chain_of(
        seed, (torch.float32, torch.float16, torch.bool, torch.complex64)
    )
    host = values(shape, dtype)
    expected = apply(host, steps)
    x = apply(host.to("xla"), steps)
    array = x.numpy(force=True)
    strides = tuple(step // array.itemsize for step in array.strides)
    assert strides == x.stride() or not array.size
    assert array.flags.c_contiguous
    assert array.tobytes() == bits(expected)
    assert x.tolist() == expected.tolist()
    if dtype is not torch.bool:  # DLPack capsules of torch 2.11 have no bool
        given_away = torch_dlpack.from_dlpack(xla_dlpack.to_dlpack(x))
        assert same_bits(given_away, expected)
        assert given_away.is_contiguous()


@pytest.mark.parametrize("rows", [4, 700], ids=["cut out on the host", "cut out on the device"])
def test_a_contiguous_transpose_of_any_size(rows, tmp_path):
    """Views of small storages are cut out on the host, those of large ones by a program."""
    weight = torch.arange(rows * 600.0).reshape(rows, 600)
    x = weight.to("xla").t().contiguous()
    assert x.cpu().stride() == x.stride() == (rows, 1)
    safetensors.save_file({"w": x}, tmp_path / "w.safetensors")
    safetensors.save_file({"w": weight.t().contiguous()}, tmp_path / "cpu.safetensors")
    assert (tmp_path / "w.safetensors").read_bytes() == (tmp_path / "cpu.safetensors").read_bytes()


def test_safetensors_save_model_writes_what_it_writes_on_the_cpu(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3))
    model[1].weight = torch.nn.Parameter(model[0].weight.detach().t().contiguous())
    safetensors.save_model(model, str(tmp_path / "cpu.safetensors"))
    moved = copy.deepcopy(model).to("xla")
    moved[1].weight = torch.nn.Parameter(moved[0].weight.detach().t().contiguous())
    safetensors.save_model(moved, str(tmp_path / "xla.safetensors"))
    assert (tmp_path / "xla.safetensors").read_bytes() == (
        tmp_path / "cpu.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.empty(0, dtype=torch.uint8, device=device).view(torch.float32),
        lambda device: torch.empty(0, 3, device=device).t(),
        lambda device: torch.empty(0, 4, 8, dtype=torch.uint8, device=device).view(torch.int16),
        lambda device: torch.ones((), device=device),
        lambda device: torch.ones(3, device=device)[1],
        lambda device: torch.ones(2, 3, device=device)[:, 3:],
        lambda device: torch.ones(1, 3, device=device).t(),
        lambda device: torch.ones(3, 1, 4, 1, device=device).permute(3, 0, 1, 2),
    ],
)
def test_tensors_of_few_elements_or_none(make):
    x, expected = make("xla"), make("cpu")
    for way in (WAYS["cpu"], WAYS["copy_"], WAYS["torch.save"], WAYS["xm.save"]):
        got = way(x)
        assert torch.equal(got, expected)
        assert got.dtype == expected.dtype
        assert got.stride() == x.stride()


@pytest.mark.parametrize("name", ["t", "transpose", "narrow", "step", "first", "reshape", "expand"])
def test_contiguous_copies_where_it_copies_on_the_cpu(name):
    """Writing to the result reaches the tensor it was made from, or not, as on the CPU."""
    looks = {
        "t": lambda x: x.t(),
        "transpose": lambda x: x[None].transpose(0, 1),  # of size 1: contiguous on the CPU too
        "narrow": lambda x: x.narrow(1, 1, 2),
        "step": lambda x: x[::2],
        "first": lambda x: x[1],
        "reshape": lambda x: x.reshape(4, 3),
        "expand": lambda x: x[:1].expand(3, 4),
    }
    left = []
    for device in ("cpu", "xla"):
        x = torch.arange(12.0, requires_grad=True)
        base = x.to(device).reshape(3, 4).clone()
        made = looks[name](base).contiguous()
        assert made.untyped_storage() == made.contiguous().untyped_storage()
        made.mul_(2)
        (base.sum() + 3 * made.sum()).backward()
        left.append((base.cpu(), made.cpu(), x.grad))
    for host, xla in zip(*left, strict=True):
        assert torch.equal(host, xla)


def test_operands_of_operators_that_run_on_the_cpu(monkeypatch):
    """They lie as the tensor says, so that an operator chooses the way it takes for these strides."""
    seen = []
    with torch.library._scoped_library("to_host_test", "FRAGMENT") as library:
        library.define("strides(Tensor x) -> Tensor")

        def strides(x):
            seen.append((x.stride(), x.is_contiguous()))
            return torch.tensor(x.stride())

        library.impl("strides", strides, "CPU")
        x = torch.arange(12.0, device="xla").reshape(3, 4).t()
        with pytest.warns(UserWarning, match="runs on the CPU"):
            torch.ops.to_host_test.strides(x)
    assert seen == [(x.stride(), True)]


def test_a_memory_format_that_is_asked_for():
    x = torch.arange(24.0, device="xla").reshape(1, 2, 3, 4)
    got = x.to("cpu", memory_format=torch.channels_last)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(got, x.cpu())


def test_to_meta_reads_no_value(compile_count):
    before = compile_count()
    x = torch.ones(2, 3, device="xla") * 2
    meta = x.to("meta", dtype=torch.float16)
    assert (meta.device.type, meta.shape, meta.dtype) == ("meta", x.shape, torch.float16)
    assert compile_count() == before
