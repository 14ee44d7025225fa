"""``torch.load(map_location="xla")`` of checkpoints that were saved on the CPU and on ``xla``."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import torch_xla
from xla_core.testing.against_cpu import fallbacks


def saved(value, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


VALUES = {
    "matrix": torch.arange(24.0).reshape(4, 6),
    "channels_last": torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
    "none": torch.empty(0, 2),
    "flag": torch.tensor(True),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "eight": torch.ones(3).to(torch.float8_e5m2),
    "complex": torch.tensor([1 + 2j]),
    "number": torch.tensor(3),
}


@pytest.mark.parametrize(
    "map_location", ["xla", "xla:0", torch.device("xla"), {"cpu": "xla:0"}], ids=repr
)
@pytest.mark.parametrize("origin", ["cpu", "xla"])
def test_values(map_location, origin):
    if origin == "xla" and isinstance(map_location, dict):
        map_location = {"xla:0": "xla:0"}
    loaded = torch.load(
        saved({name: value.to(origin) for name, value in VALUES.items()}),
        map_location=map_location,
    )
    for name, value in VALUES.items():
        assert loaded[name].device == torch.device("xla:0")
        assert loaded[name].dtype == value.dtype
        assert (
            loaded[name].cpu().float().equal(value.float())
            if name == "eight"
            else (loaded[name].cpu().equal(value))
        )


COMPLEX = torch.tensor([1 + 2j, 3 - 1j])


@pytest.mark.parametrize(
    "values",
    [
        {"plain": COMPLEX, "conjugated": COMPLEX.conj()},
        {"conjugated": COMPLEX.conj(), "again": COMPLEX.conj().reshape(2, 1)},
        {"imaginary": COMPLEX.imag, "negated": COMPLEX.conj().imag},
    ],
    ids=lambda values: "-".join(values),
)
def test_tensors_that_are_conjugated_or_negated_lazily(values):
    loaded = torch.load(saved(values), map_location="xla")
    for name, value in values.items():
        assert not loaded[name].is_conj() and not loaded[name].is_neg()
        assert torch.equal(loaded[name].cpu(), value.clone())
        assert torch.equal((loaded[name] * 2).cpu(), value * 2)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_what_shares_memory_in_the_file_shares_it_on_the_device(order):
    host = torch.arange(24.0).reshape(4, 6)
    parts = [host, host.t()[1:], host[1]]
    loaded = dict(
        zip(order, torch.load(saved([parts[i] for i in order]), map_location="xla"), strict=True)
    )
    for number, part in enumerate(parts):
        assert loaded[number].cpu().equal(part)
    loaded[2].fill_(-1)
    host[1] = -1
    for number, part in enumerate(parts):
        assert loaded[number].cpu().equal(part)


def test_a_whole_module_keeps_its_ties():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    loaded = torch.load(saved(model), map_location="xla", weights_only=False)
    assert loaded[0].weight is loaded[2].weight
    assert {t.device.type for t in loaded.state_dict().values()} == {"xla"}
    x = torch.randn(4, 3)
    torch.testing.assert_close(loaded(x.to("xla")).cpu(), model(x))


def test_training_goes_on_where_it_was():
    def make():
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(3, 4, device=model.weight.device)).square().sum().backward()
        optimizer.step()

    model, optimizer = make()
    step(model, optimizer)
    file = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    step(model, optimizer)
    moved, its_optimizer = make()
    moved.to("xla")
    its_optimizer = torch.optim.AdamW(moved.parameters(), lr=0.1)
    with fallbacks() as ran_on_cpu:
        loaded = torch.load(file, map_location="xla")
        moved.load_state_dict(loaded["model"], assign=False)
        its_optimizer.load_state_dict(loaded["optimizer"])
        step(moved, its_optimizer)
        torch_xla.sync()
    assert not ran_on_cpu
    torch.testing.assert_close(moved.weight.cpu(), model.weight)


def test_a_tensor_that_is_a_whole_storage_is_no_view():
    (value,) = torch.load(saved([torch.ones(3, 4)]), map_location="xla")
    assert value._v is None


def test_files_that_are_mapped_into_memory(tmp_path):
    torch.save(VALUES["matrix"], tmp_path / "matrix.pt")
    loaded = torch.load(tmp_path / "matrix.pt", mmap=True, map_location="xla")
    (tmp_path / "matrix.pt").unlink()
    assert loaded.cpu().equal(VALUES["matrix"])


@pytest.fixture
def forgotten_location():
    """After an error torch.load (2.11 to 2.15) keeps ``map_location`` for what is unpickled until the next load."""
    yield
    torch.load(saved(torch.ones(1)))


@pytest.mark.usefixtures("forgotten_location")
def test_what_cannot_be_loaded_so_says_what_to_do():
    former = saved(torch.ones(2), _use_new_zipfile_serialization=False)
    with pytest.raises(RuntimeError, match=r'map_location="cpu".*\.to\(\'xla\'\)'):
        torch.load(former, map_location="xla")
    with pytest.raises(RuntimeError, match="there is no device xla:77"):
        torch.load(saved(torch.ones(2)), map_location="xla:77")
    with pytest.raises(RuntimeError, match="needs a tensor there, got a storage on cpu"):
        torch.ones(2, device="xla").set_(torch.ones(2).untyped_storage(), 0, (2,), (1,))


def test_it_may_be_the_first_use_of_the_device(run_python, tmp_path):
    torch.save({"weight": torch.full((3,), 2.0)}, tmp_path / "state.pt")
    code = f"""
import torch
loaded = torch.load({str(tmp_path / "state.pt")!r}, map_location="xla")
print(loaded["weight"].device, loaded["weight"].tolist())
"""
    assert run_python(code).splitlines()[-1] == "xla:0 [2.0, 2.0, 2.0]"
