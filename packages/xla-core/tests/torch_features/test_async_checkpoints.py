"""``torch.distributed.checkpoint.async_save`` and torch's other ways of taking a state dict to the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._state_dict_utils import (
    _copy_state_dict,
    _create_cpu_state_dict,
    _offload_state_dict_to_cpu,
)
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import (
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.utils import _pytree as pytree

import torch_xla
from xla_core.torch_features import checkpoint_staging

# torch warns of what is asked for here: to save without a process group
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(params=["no group", "gloo"])
def group(request, tmp_path):
    """Whether there is no process group; otherwise it is one of this process alone."""
    if request.param == "no group":
        yield True
        return
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield False
    dist.destroy_process_group()


def trained(steps=2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4, bias=False)).to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, steps)
    return model, optimizer


def train(model, optimizer, steps):
    for _ in range(steps):
        model(torch.ones(2, 4, device="xla")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()


def on_cpu(data):
    """A copy of a state dict, taken the plain way."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu().clone(), data)


def check_same(found, wanted):
    # torch makes plain dictionaries of OrderedDicts: the ways to the leaves tell the form
    leaves, wanted_leaves = map(pytree.tree_leaves_with_path, (on_cpu(found), on_cpu(wanted)))
    for (path, one), (wanted_path, other) in zip(leaves, wanted_leaves, strict=True):
        assert path == wanted_path
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        else:
            assert one == other


def everything(model, optimizer):
    first = model[0].weight.detach()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "tied": [first, first.t(), (first[1], 2)],
        "step": 3,
        "name": "run",
    }


@pytest.mark.parametrize("stager", ["default", "blocking", "in a thread, shared"])
def test_what_is_saved_are_the_values_at_the_call(group, stager, tmp_path):
    """Training goes on in place, and with the memory of the former values, while the files are written."""
    model, optimizer = trained()
    wanted = on_cpu(everything(model, optimizer))
    given = {
        "default": None,
        "blocking": BlockingAsyncStager(),
        "in a thread, shared": DefaultStager(StagingOptions(False, True, True, False)),
    }[stager]
    state = everything(model, optimizer)
    saving = dcp.async_save(
        state, checkpoint_id=tmp_path / "saved", async_stager=given, no_dist=group
    )
    if hasattr(saving, "staging_completion"):
        saving.staging_completion.result()
        saving = saving.upload_completion
    train(model, optimizer, 3)
    saving.result()
    if given is not None:
        given.close()
    assert not torch.equal(model[0].weight.cpu(), wanted["model"]["0.weight"])

    other, its_optimizer = trained(1)
    loaded = everything(other, its_optimizer)
    # views of one's own parameters would be written to twice
    loaded |= {"tied": [t.clone() for t in loaded["tied"][:2]] + [(torch.zeros(4).to("xla"), 0)]}
    loaded |= {"step": 0, "name": ""}
    dcp.load(loaded, checkpoint_id=tmp_path / "saved", no_dist=group)
    check_same(loaded, wanted)
    check_same(other.state_dict(), wanted["model"])  # loaded in place


@pytest.mark.sweep  # three interpreters that import torch
def test_another_process_writes_the_checkpoint(run_python):
    """``AsyncCheckpointerType.PROCESS``, which torch has for process groups only."""
    run_python(
        """
        import os, pathlib
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.utils import _pytree as pytree
        import torch_xla

        if __name__ == "__main__":
            store = dist.FileStore("store", 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            x = torch.arange(6.0, device="xla").reshape(2, 3)
            state = {"x": x, "row": x[1]}
            process = AsyncCheckpointerType.PROCESS
            saving = dcp.async_save(state, checkpoint_id="saved", async_checkpointer_type=process)
            x.mul_(-1)
            saving.result()
            loaded = {"x": torch.zeros(2, 3, device="xla"), "row": torch.zeros(3, device="xla")}
            dcp.load(loaded, checkpoint_id="saved")
            assert loaded["x"].tolist() == [[0, 1, 2], [3, 4, 5]], loaded
            assert loaded["row"].tolist() == [3, 4, 5], loaded
        """
    )


def test_another_process_needs_a_group(tmp_path):
    state = {"x": torch.zeros(2, device="xla")}
    process = AsyncCheckpointerType.PROCESS
    with pytest.raises(ValueError, match="process group has not been initialized"):
        dcp.async_save(state, checkpoint_id=tmp_path, async_checkpointer_type=process).result()


def kinds_of_tensors(device):
    a = torch.arange(12.0, device=device).reshape(3, 4)
    parameter = nn.Parameter(a * 2)
    parameter.tag = {"of": [a]}
    c = torch.view_as_complex(torch.arange(6.0).reshape(3, 2)).to(device)
    return {
        "whole": a,
        "same": a,
        "transposed": a.t(),
        "row": a[1],
        "part": a.view(-1)[3:7],
        "reshaped": a.t().reshape(-1),
        "expanded": a[0].expand(2, 4),
        "bits": a.view(torch.int32),
        "parameter": parameter,
        "detached": parameter.detach(),
        "complex": c,
        "reals": torch.view_as_real(c),
        "empty": torch.empty(0, 3, device=device),
        "number": torch.tensor(3, device=device),
        "bools": a > 4,
        "half": a.bfloat16(),
        "unwritten": torch.zeros(3, 4, device=device)[1:],
    }


@pytest.mark.parametrize("shared", [False, True])
def test_copies_alias_each_other_as_those_of_cpu_tensors_do(shared):
    staged = {}
    for device in ("cpu", "xla"):
        stager = StateDictStager(share_memory=shared)
        state = kinds_of_tensors(device)
        staged[device] = stager.stage(state)
        check_same(stager.stage(state), state)  # again, with what the first call has cached
        stager.close()
    cpu, xla = staged["cpu"], staged["xla"]
    for name, wanted in cpu.items():
        found = xla[name]
        assert type(found) is type(wanted)
        check_same(found, wanted)
        layout = found.stride(), found.storage_offset(), found.requires_grad, found.is_shared()
        assert layout == (wanted.stride(), wanted.storage_offset(), False, shared), name
    for one, two in itertools.combinations(cpu, 2):
        # an empty tensor has no memory that it could share
        if "empty" not in (one, two):
            aliases = [d[one].data_ptr() == d[two].data_ptr() for d in (cpu, xla)]
            storages = [
                d[one].untyped_storage().data_ptr() == d[two].untyped_storage().data_ptr()
                for d in (cpu, xla)
            ]
            assert aliases[0] == aliases[1] and storages[0] == storages[1], (one, two)
    assert xla["whole"] is xla["same"] is xla["parameter"].tag["of"][0]


def test_conjugates_are_copied_by_value():
    """torch's stager would copy the bytes behind a conjugate, which are those of the original."""
    c = torch.tensor([1 + 2j, 3 - 1j])
    there = c.to("xla")
    staged = StateDictStager().stage({"conj": there.conj(), "imag": there.conj().imag})
    check_same(staged, {"conj": c.conj().resolve_conj(), "imag": c.conj().imag.resolve_neg()})


def test_the_copy_of_a_state_is_made_once_per_storage(monkeypatch):
    fetched = []
    read = checkpoint_staging.read
    monkeypatch.setattr(checkpoint_staging, "read", lambda t: fetched.append(t) or read(t))
    a = torch.ones(4, 4, device="xla")
    StateDictStager().stage({"a": a, "row": a[0], "again": [a.detach(), a.t()]})
    assert len(fetched) == 1


def test_uninitialized_parameters_are_refused():
    lazy = nn.LazyLinear(2).to("xla")
    with pytest.raises(RuntimeError, match="after its first forward pass"):
        StateDictStager().stage({"weight": lazy.weight})


def test_cpu_tensors_are_staged_by_torch_as_before():
    x = torch.arange(4.0)
    staged = StateDictStager().stage({"x": x, "part": x[1:]})
    x.zero_()
    assert staged["x"].tolist() == [0, 1, 2, 3]
    assert staged["part"].tolist() == [1, 2, 3]


def test_get_state_dict_on_the_cpu(group):
    model, optimizer = trained()
    options = StateDictOptions(cpu_offload=True)
    states = get_state_dict(model, optimizer, options=options)
    wanted = on_cpu(get_state_dict(model, optimizer))
    leaves = [leaf for leaf in pytree.tree_leaves(states) if isinstance(leaf, torch.Tensor)]
    assert leaves and all(leaf.device.type == "cpu" for leaf in leaves)
    check_same(states, wanted)


def test_state_dicts_are_copied_to_the_cpu():
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    wanted = on_cpu(state)
    check_same(_offload_state_dict_to_cpu(state), wanted)
    room = _create_cpu_state_dict(state)
    copied = _copy_state_dict(state, room)
    train(model, optimizer, 1)
    check_same(copied, wanted)
    check_same(room, wanted)


def test_nothing_of_it_is_imported_before_it_is_asked_for(run_interpreter):
    """Importing torch.distributed.checkpoint takes a while, which other programs need not spend."""
    run_interpreter(
        """
        import sys
        import torch_xla
        name = "torch.distributed.checkpoint._state_dict_stager"
        assert name not in sys.modules
        import importlib.util
        assert importlib.util.find_spec(name) is not None  # looked for only
        import torch
        import torch.distributed.checkpoint as dcp
        assert name in sys.modules
        x = torch.ones(2, device="xla")
        saving = dcp.async_save({"x": x}, checkpoint_id="saved", no_dist=True)
        x.zero_()
        saving.result()
        dcp.load({"x": x}, checkpoint_id="saved", no_dist=True)
        assert x.tolist() == [1, 1]
        """
    )
