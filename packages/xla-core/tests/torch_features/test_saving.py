"""``xm.save``, ``xser.save``, direct ``torch.save`` and safetensors of ``xla`` tensors."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

import torch_xla.core.xla_model as xm
import torch_xla.utils.serialization as xser
from xla_core.support import atomic_file, caches, counters
from xla_core.torch_features.saving import TensorReference

Pair = namedtuple("Pair", "first second")

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")


@pytest.mark.parametrize("save", [xm.save, xser.save], ids=["xm", "xser"])
def test_nested_containers_come_back_on_the_cpu(save, tmp_path):
    x = torch.arange(6.0, device="xla").reshape(2, 3)
    data = {
        "list": [x, (x[0], {"deep": x.t()})],
        "other": [1, "text", None, torch.ones(2)],
        "half": x.to(torch.bfloat16),
        "flags": x > 2,
        "eight": x.to(torch.float8_e5m2),
        "ordered": OrderedDict(a=x.int()),
    }
    save(data, tmp_path / "data.pt")
    host = x.cpu()
    loaded = torch.load(tmp_path / "data.pt")  # weights only
    assert torch.equal(loaded["list"][0], host)
    assert torch.equal(loaded["list"][1][0], host[0])
    assert torch.equal(loaded["list"][1][1]["deep"], host.t())
    assert loaded["other"][:3] == [1, "text", None]
    for name in ("half", "flags", "eight"):
        assert loaded[name].dtype == data[name].dtype
        assert loaded[name].float().equal(data[name].cpu().float())
    assert type(loaded["ordered"]) is OrderedDict
    assert loaded["ordered"]["a"].device.type == "cpu"


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_attributes_of_tensors_and_parameters_are_pickled(device, tmp_path):
    tensor, parameter = torch.ones(2, device=device), nn.Parameter(torch.ones(2, device=device))
    tensor.label, parameter.label = "data", {"rows": 2}
    torch.save([tensor, parameter], tmp_path / "data.pt")
    for pair in (torch.load(tmp_path / "data.pt"), pickle.loads(pickle.dumps([tensor, parameter]))):
        assert [one.label for one in pair] == ["data", {"rows": 2}]
        assert [one.device.type for one in pair] == [device] * 2
        assert type(pair[1]) is type(parameter) and isinstance(pair[1], nn.Parameter)


def test_a_model_keeps_ties_parameters_and_versions(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).to("xla")
    model[2].weight = model[0].weight
    xm.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    assert state._metadata[""] == {"version": 1}
    assert state["0.weight"].data_ptr() == state["2.weight"].data_ptr()
    xm.save(model, tmp_path / "model.pt")  # tensors in attributes of objects
    whole = torch.load(tmp_path / "model.pt", weights_only=False)
    assert isinstance(whole[0].weight, nn.Parameter)
    assert {p.device.type for p in whole.parameters()} == {"cpu"}
    assert whole[0].weight is whole[2].weight


def test_named_tuples_and_file_objects():
    file = io.BytesIO()
    xm.save(Pair(torch.ones(2, device="xla"), 3), file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    assert type(found).__name__ == "Pair"
    assert found.first.tolist() == [1, 1]


def test_tensors_are_fetched_one_at_a_time(tmp_path, monkeypatch):
    """When the third is fetched, the first two are in the file already."""
    path = tmp_path / "big.pt"
    sizes = []
    original = os.path.getsize
    rows = [torch.full((50_000,), float(i), device="xla") for i in range(4)]
    read = xser.save.__globals__["saving"].read

    def watching(tensor):
        (temporary,) = tmp_path.glob("*.saving-*")
        sizes.append(original(temporary))
        return read(tensor)

    monkeypatch.setattr("xla_core.torch_features.saving.read", watching)
    xser.save(rows, path)
    assert len(sizes) == 4
    assert all(later - former >= 200_000 for former, later in itertools.pairwise(sizes[1:]))
    assert [t[0].item() for t in xser.load(path)] == [0, 1, 2, 3]


def test_loading_refuses_code_unless_told_otherwise(tmp_path):
    xser.save({"a": Pair(torch.ones(1, device="xla"), 2)}, tmp_path / "x.pt")
    with pytest.raises(Exception, match="weights_only"):
        xser.load(tmp_path / "x.pt")
    assert xser.load(tmp_path / "x.pt", weights_only=False)["a"].second == 2


def test_files_of_torch_xla_2_9(tmp_path):
    """Its xser.save writes references, and each tensor to a file of its own in a folder beside."""
    path = tmp_path / "old.pt"
    (tmp_path / "old.pt.tensors").mkdir()
    for number, tensor in enumerate([torch.ones(2), torch.zeros(3)]):
        torch.save(tensor, tmp_path / "old.pt.tensors" / f"tensor_{number}.pt")
    reference = TensorReference
    torch.save({"a": reference(0), "b": [reference(1), reference(0)]}, path)
    assert b"torch_xla.utils.serialization" in path.read_bytes()
    loaded = xser.load(path)
    assert loaded["a"].tolist() == [1, 1]
    assert loaded["b"][0].tolist() == [0, 0, 0]
    (tmp_path / "old.pt.tensors" / "tensor_1.pt").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"folder .*old\.pt\.tensors, which lacks tensor_1\.pt"
    ):
        xser.load(path)


def test_only_the_master_saves(tmp_path, monkeypatch):
    asked = []

    def is_master(local=True):
        asked.append(local)
        return False

    monkeypatch.setattr("xla_core.api.xla_model.is_master_ordinal", is_master)
    xm.save([1], tmp_path / "a.pt")
    xm.save([1], tmp_path / "b.pt", global_master=True)
    xm.save([1], tmp_path / "c.pt", master_only=False)
    assert asked == [True, False]
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]


def test_direct_torch_save_goes_back_to_the_device():
    x = torch.arange(4.0, device="xla")
    p = nn.Parameter(x.clone(), requires_grad=False)
    file = io.BytesIO()
    torch.save({"x": x, "view": x[1:3], "p": p}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["x"].device == x.device
    assert torch.equal(loaded["x"], x)
    assert loaded["view"].tolist() == [1, 2]
    assert isinstance(loaded["p"], nn.Parameter)
    assert not loaded["p"].requires_grad
    file.seek(0)
    assert torch.load(file, map_location="cpu")["view"].tolist() == [1, 2]


def test_direct_torch_save_writes_tied_weights_once():
    embedding, head = torch.nn.Embedding(300, 20), torch.nn.Linear(20, 300, bias=False)
    model = torch.nn.Sequential(embedding, head).to("xla")
    head.weight = embedding.weight
    tied = io.BytesIO()
    torch.save(model.state_dict(), tied)
    assert 300 * 20 * 4 < len(tied.getvalue()) < 1.5 * 300 * 20 * 4
    tied.seek(0)
    first, second = torch.load(tied, map_location="cpu", weights_only=True).values()
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    torch.testing.assert_close(first, head.weight.detach().cpu())


def test_what_is_written_between_two_pickles_is_in_the_second():
    x = torch.zeros(3, device="xla")
    held = x.__reduce_ex__(2)  # keeps the value that it read
    x.add_(1)
    assert pickle.loads(pickle.dumps(x)).tolist() == [1.0] * 3
    again = x.__reduce_ex__(2)
    again[1][0].mul_(5)
    assert x.__reduce_ex__(2)[1][0].tolist() == [1.0] * 3
    assert held[1][0].tolist() == [0.0] * 3


def test_safetensors_of_large_tensors_are_loaded_to_the_device(tmp_path):
    state = {"w": torch.randn(64, 128), "b": torch.randn(8192).bfloat16(), "n": torch.arange(9000)}
    safetensors.save_file(state, tmp_path / "m.safetensors")
    caches.clear_all()  # as in a new process: no view of another dtype was made before
    loaded = safetensors.load_file(tmp_path / "m.safetensors", device="xla")
    assert loaded.keys() == state.keys()
    for name, value in loaded.items():
        assert value.device.type == "xla"
        assert torch.equal(value.cpu(), state[name])


def test_safetensors(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("xla")
    model[1].weight = model[0].weight
    safetensors.save_model(model, str(tmp_path / "m.safetensors"))
    assert len(safetensors.load_file(tmp_path / "m.safetensors")) == 3  # the shared weight once
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("xla")
    other[1].weight = other[0].weight
    safetensors.load_model(other, str(tmp_path / "m.safetensors"))
    assert torch.equal(other[0].weight, model[0].weight)
    x = torch.arange(6.0, device="xla")
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.save_file({"a": x, "b": x[2:]}, tmp_path / "n.safetensors")
    safetensors.save_file({"a": x, "b": x[2:].clone()}, tmp_path / "n.safetensors")
    assert safetensors.load_file(tmp_path / "n.safetensors")["b"].tolist() == [2, 3, 4, 5]


def test_storages_tell_identity_and_size():
    x = torch.zeros(4, 2, device="xla")
    storage = x.untyped_storage()
    assert storage == x.t().untyped_storage() == x.detach().untyped_storage()
    assert storage != torch.zeros(4, 2, device="xla").untyped_storage()
    assert len(storage) == storage.nbytes() == 32
    assert x[1:].data_ptr() - x.data_ptr() == 8
    assert storage.device == x.device
    with pytest.raises(RuntimeError, match=r"no memory that can be used for tolist\(\)"):
        storage.tolist()


# -- interruptions --------------------------------------------------------------------------------


def test_an_error_leaves_the_former_file_and_no_other(tmp_path):
    path = tmp_path / "state.pt"
    xm.save([1, 2], path)
    before = path.read_bytes()
    with pytest.raises(Exception, match=r"pickle|local object"):
        xm.save([torch.ones(3, device="xla"), lambda: None], path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def test_a_link_and_permissions_stay(tmp_path):
    real, link = tmp_path / "real.pt", tmp_path / "link.pt"
    xm.save(1, real)
    assert real.stat().st_mode & 0o777 == 0o666 & ~_umask()
    real.chmod(0o640)
    link.symlink_to(real)
    xm.save(2, link)
    assert link.is_symlink()
    assert torch.load(real) == 2
    assert real.stat().st_mode & 0o777 == 0o640


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_leftovers_of_dead_writers_are_removed_those_of_living_ones_are_not(tmp_path):
    (tmp_path / "x.saving-pt-dead").write_bytes(b"torn")
    with atomic_file.replacing(tmp_path / "x.pt") as temporary:
        temporary.write_bytes(b"first")
        assert not (tmp_path / "x.saving-pt-dead").exists()
        xm.save(3, tmp_path / "x.pt")  # beside a living writer
        assert temporary.exists()
    assert (tmp_path / "x.pt").read_bytes() == b"first"


KILLED = """
    import itertools, sys
    import torch, torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.utils.serialization as xser
    save = {"xm": xm.save, "xser": xser.save}[sys.argv[1]]
    for number in itertools.count(1):
        rows = [torch.full((40_000,), float(number), device="xla") for _ in range(6)]
        save({"number": number, "rows": rows}, "state.pt")
        if number == 1:
            print("ready", flush=True)
"""


@pytest.mark.parametrize("save", ["xm", "xser"])
def test_killing_the_process_never_loses_the_file(save, tmp_path):
    """SIGKILL at ten random moments of a loop that saves all the time."""
    random.seed(save)
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    code = textwrap.dedent(KILLED)
    last = 0
    for _ in range(2):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", code, save],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        ]
        (writer,) = writers
        assert writer.stdout.readline().strip() == b"ready"
        # stopped at a random moment, looked at, and let go on; at last killed
        for _ in range(5):
            time.sleep(random.uniform(0.0, 0.03))
            os.kill(writer.pid, signal.SIGSTOP)
            last = _check(tmp_path / "state.pt", 1)
            os.kill(writer.pid, signal.SIGCONT)
        time.sleep(random.uniform(0.0, 0.03))
        writer.kill()
        writer.wait()
        writer.stdout.close()
        _check(tmp_path / "state.pt", last)
    xm.save({"number": 0}, tmp_path / "state.pt")
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def _check(path, least):
    """Whole, and no older than what was there before."""
    loaded = xser.load(path)
    assert loaded["number"] >= least
    assert all((row == loaded["number"]).all() for row in loaded["rows"])
    return loaded["number"]


def test_saving_counts_no_fallback(tmp_path, fallbacks):
    xm.save(nn.Linear(2, 2).to("xla").state_dict(), tmp_path / "m.pt")
    assert not fallbacks()
    assert counters.all_counters()


def test_torch_xlas_former_form_written_by_its_helpers(tmp_path):
    path = tmp_path / "model.pt"
    folder = xser._get_tensors_folder(path)
    data = {"w": [torch.arange(3.0, device="xla"), 7], "b": torch.ones(2, device="xla")}
    for _ in range(2):  # the second time the folder is there
        rewritten = xser._rewrite_data(folder, data, True)
    assert [rewritten["w"][0].tid, rewritten["b"].tid] == [0, 1]
    assert torch.equal(torch.load(xser._get_tensor_file(folder, 1)), torch.ones(2))
    torch.save(rewritten, path)
    loaded = xser.load(path)
    assert loaded["w"][0].tolist() == [0.0, 1.0, 2.0]
    assert loaded["w"][1] == 7
    assert isinstance(xser._rewrite_data(tmp_path / "none", data, False)["b"], TensorReference)
    assert not (tmp_path / "none").exists()
