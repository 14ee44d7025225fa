"""Checkpoints of split tensors: by torch's functions with our planners, and by the manager."""

from __future__ import annotations

import datetime
import math
import os
import pickle
import signal
import textwrap
import threading
import time

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import torch_xla
import torch_xla.distributed.spmd as xs
from torch_xla.experimental.distributed_checkpoint import (
    CheckpointManager,
    SPMDLoadPlanner,
    SPMDSavePlanner,
    prime_optimizer,
)
from xla_spmd.checkpoint import storage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def turned():
    """The devices as two by four, in another order."""
    return xs.Mesh(np.arange(8).reshape(2, 4)[::-1].reshape(-1), (2, 4), ("data", "model"))


def manager(path, interval=10, **options):
    return CheckpointManager(str(path), interval, **{"chkpt_on_preemption": False, **options})


def split(mesh, spec, values):
    tensor = values.to("xla")
    return xs.mark_sharding(tensor, mesh, spec)


def save(path, state):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), planner=SPMDSavePlanner())


def load(path, state, planner=None):
    reader = dcp.FileSystemReader(path)
    dcp.load(state, storage_reader=reader, planner=planner or SPMDLoadPlanner())
    return state


def some_state():
    """Values by name, as they are before they are split."""
    torch.manual_seed(0)
    return {
        "both": torch.randn(8, 16),
        "rows": torch.randn(16, 3).bfloat16(),
        "whole": torch.arange(5),
        "number": torch.tensor(2.5),
        "nested": {"list": [torch.randn(8), torch.randn(8)]},
    }


def on_mesh(mesh, values, specs):
    state = {name: split(mesh, spec, values[name]) for name, spec in specs.items()}
    state |= {name: values[name].to("xla") for name in ("whole", "number")}
    listed = values["nested"]["list"]
    state["nested"] = {"list": [split(mesh, ("model",), listed[0]), listed[1].to("xla")]}
    return state


def leaves(state):
    found = torch.utils._pytree.tree_leaves(state)
    return [leaf.detach().cpu() for leaf in found if isinstance(leaf, torch.Tensor)]


def zeros(values):
    return torch.utils._pytree.tree_map(torch.zeros_like, values)


SPECS = {"both": ("data", "model"), "rows": ("data", None)}
OTHER_SPECS = {"both": (None, "data"), "rows": (("model", "data"), None)}


def test_values_survive_another_mesh(mesh, turned, tmp_path):
    values = some_state()
    save(tmp_path, on_mesh(mesh, values, SPECS))
    found = load(tmp_path, on_mesh(turned, zeros(values), OTHER_SPECS))
    for name, spec in OTHER_SPECS.items():
        assert found[name].sharding_spec == turned.get_op_sharding(spec).text
    for mine, wanted in zip(leaves(found), leaves(values), strict=True):
        assert mine.dtype is wanted.dtype and torch.equal(mine, wanted)


def test_each_part_is_written_once(mesh, tmp_path):
    values = some_state()
    save(tmp_path, on_mesh(mesh, values, SPECS))
    written = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    chunks = {name: [tuple(c.sizes) for c in w.chunks] for name, w in written.items()}
    assert chunks["both"] == [(2, 8)] * 8
    assert chunks["rows"] == [(4, 3)] * 4  # two devices hold each
    assert chunks["whole"] == [(5,)] and chunks["nested.list.0"] == [(4,)] * 2
    assert all(math.prod(w.size) == sum(map(math.prod, chunks[n])) for n, w in written.items())


def test_plain_checkpoints_and_ours_are_of_one_format(mesh, tmp_path):
    values = some_state()
    save(tmp_path / "split", on_mesh(mesh, values, SPECS))
    on_cpu = load(tmp_path / "split", zeros(values), dcp.DefaultLoadPlanner())
    assert all(map(torch.equal, leaves(on_cpu), leaves(values)))
    dcp.save(values, storage_writer=dcp.FileSystemWriter(tmp_path / "plain"))
    found = load(tmp_path / "plain", on_mesh(mesh, zeros(values), SPECS))
    assert all(map(torch.equal, leaves(found), leaves(values)))


def test_views_are_read_into(mesh, tmp_path):
    whole = split(mesh, ("data", None), torch.arange(16.0).reshape(8, 2))
    save(tmp_path, {"t": whole[2:4]})
    load(tmp_path, {"t": whole[6:8]})
    assert whole.cpu()[6:].tolist() == [[4, 5], [6, 7]] and whole.cpu()[5].tolist() == [10, 11]


def test_tensors_of_one_device_are_saved_too(run_python):
    """Outside of SPMD mode the same functions work on the tensors of ``xla:0``."""
    found = run_python(
        """
        import torch, torch_xla
        from torch_xla.experimental.distributed_checkpoint import CheckpointManager
        saver = CheckpointManager("run", 1)
        t = torch.arange(4.0).to("xla")
        saver.save_async(1, {"t": t * 2, "step": 1})
        state = {"t": t, "step": 0}
        saver.restore(1, state)
        print(t.tolist(), state["step"], torch_xla.device_count())
        """
    )
    assert found.split("\n")[0] == "[0.0, 2.0, 4.0, 6.0] 1 8"


def test_a_shape_that_does_not_fit_is_refused(mesh, tmp_path):
    save(tmp_path, {"t": split(mesh, ("data",), torch.ones(8))})
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
        load(tmp_path, {"t": split(mesh, ("data",), torch.ones(16))})


def training(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).to("xla")
    xs.mark_sharding(model[0].weight, mesh, ("model", "data"))
    xs.mark_sharding(model[2].weight, mesh, ("data", "model"))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16).to("xla")).square().mean()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.item())
    return losses


def test_training_goes_on_where_it_was(mesh, turned, tmp_path):
    """As the guide to CheckpointManager shows it: every step, restored into another mesh."""
    model, optimizer = training(mesh)
    chkpt_mgr = manager(tmp_path, 3)
    for step in range(1, 6):
        train(model, optimizer, [step])
        state_dict = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": step}
        assert chkpt_mgr.save_async(step, state_dict) == (step == 3)
    chkpt_mgr.join()
    wanted = train(*_again(mesh, range(1, 4)), range(4, 8))

    model, optim = training(turned)
    chkpt_mgr = manager(tmp_path, 3)
    tracked_steps = chkpt_mgr.all_steps()
    assert tracked_steps == [3]
    prime_optimizer(optim)
    state_dict = {"model": model.state_dict(), "optim": optim.state_dict(), "step": 0}
    chkpt_mgr.restore(max(tracked_steps), state_dict)
    model.load_state_dict(state_dict["model"])
    optim.load_state_dict(state_dict["optim"])
    assert state_dict["step"] == 3
    moment = optim.state[model[0].weight]["exp_avg"]
    assert torch_xla._XLAC._get_xla_sharding_spec(moment) == (
        turned.get_op_sharding(("model", "data")).text
    )
    # sums over parts of another size
    np.testing.assert_allclose(train(model, optim, range(4, 8)), wanted, rtol=1e-5)


def _again(mesh, steps):
    made = training(mesh)
    train(*made, steps)
    return made


def test_a_saved_state_is_that_of_the_call(mesh, tmp_path):
    """What is written in the background is a copy: tensors, host tensors and other objects."""
    t, host, names = split(mesh, ("data",), torch.ones(8)), torch.ones(2), ["a"]
    saver = manager(tmp_path)
    blocked = threading.Event()
    saver._worker.submit(blocked.wait)
    assert saver.save_async(10, {"t": t, "host": host, "names": names, "on": t * 2})
    t.add_(5)
    host.add_(5)
    names.append("b")
    torch_xla.sync()
    assert saver.all_steps() == []
    blocked.set()
    found = {"t": t, "host": host, "names": None, "on": torch.zeros(8).to("xla")}
    saver.restore(10, found)
    assert t.cpu().tolist() == [1] * 8 and host.tolist() == [1, 1] and found["names"] == ["a"]
    assert found["on"].cpu().tolist() == [2] * 8


def test_which_steps_are_saved_and_kept(mesh, tmp_path):
    t = split(mesh, ("data",), torch.zeros(8))
    saver = manager(tmp_path, 2, max_to_keep=2)
    taken = [step for step in range(1, 8) if saver.save(step, {"t": t.add_(1)})]
    assert taken == [2, 4, 6] and saver.all_steps() == [4, 6]
    assert saver.save(7, {"t": t}, force=True)
    assert saver.all_steps() == [6, 7] == manager(tmp_path).all_steps()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["6", "7"]
    with pytest.raises(ValueError, match=r"no checkpoint of step 4 .*; there are \[6, 7\]"):
        saver.restore(4, {"t": t})


def test_a_step_saved_again_replaces_the_former(mesh, tmp_path):
    t = split(mesh, ("data",), torch.ones(8))
    saver = manager(tmp_path)
    for value in (1, 2, 3):
        saver.save(10, {"t": t.fill_(value)})
    assert len(list(tmp_path.iterdir())) == 1
    t.zero_()
    manager(tmp_path).restore(10, {"t": t})
    assert t.cpu().tolist() == [3] * 8


KILLED = """
    import os, sys, numpy as np, torch, torch_xla, torch_xla.runtime as xr
    import torch_xla.distributed.spmd as xs
    import torch.distributed.checkpoint as dcp
    from torch_xla.experimental.distributed_checkpoint import CheckpointManager
    from xla_spmd.checkpoint import storage
    xr.use_spmd()
    t = torch.ones(8).to("xla")
    xs.mark_sharding(t, xs.get_1d_mesh("x"), ("x",))
    saver = CheckpointManager("run", 1, chkpt_on_preemption=False)
    saver.save(5, {{"t": t}})
    def die(*args, **kwargs):
        os._exit(1)
    {owner}.{name} = die
    saver.{save}(5, {{"t": t * 2}})
    saver.join()
"""


@pytest.mark.parametrize("save", ["save", "save_async"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("dcp.FileSystemWriter", "finish"),
        ("storage.Storage", "complete"),
        ("storage.Storage", "remove"),
    ],
    ids=["written", "before it counts", "after"],
)
def test_an_interrupted_save_leaves_the_earlier_one(run_python, tmp_path, owner, name, save):
    """The process dies while it writes the same step again: the step is there, before or after."""
    run_python(KILLED.format(owner=owner, name=name, save=save), fails=True)
    saver = manager(tmp_path / "run")
    t = torch.zeros(8).to("xla")
    assert saver.all_steps() == [5]
    saver.restore(5, {"t": t})
    assert t.cpu().tolist() == ([2] if name == "remove" else [1]) * 8
    saver.save(5, {"t": t + 6}, force=True)
    manager(tmp_path / "run").restore(5, {"t": t})
    assert t.cpu().tolist() == ([8] if name == "remove" else [7]) * 8


def test_the_newest_checkpoint_is_known_in_another_time_zone(monkeypatch, tmp_path):
    """Without zones the second would look 17 hours older than the first, and be deleted in its place."""
    try:
        for step, zone in ((10, "Asia/Tokyo"), (20, "America/Los_Angeles")):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            manager(tmp_path).save(step, {"t": torch.ones(2)})
        assert [record.step for record in storage.Storage(str(tmp_path)).records()] == [10, 20]
        saver = manager(tmp_path, max_to_keep=2)
        saver.save(30, {"t": torch.ones(2)})
        assert saver.all_steps() == manager(tmp_path).all_steps() == [20, 30]
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()


def test_a_failed_save_is_reported_and_harmless(mesh, tmp_path):
    saver = manager(tmp_path)
    saver.save(10, {"t": torch.ones(2).to("xla")})
    saver.save_async(20, {"t": torch.ones(2), "lock": _Unpicklable()})
    with pytest.raises(dcp.api.CheckpointException, match="not to be pickled"):
        saver.join()
    saver.save(30, {"t": torch.ones(2).to("xla")})
    assert saver.all_steps() == [10, 30] == manager(tmp_path).all_steps()


class _Unpicklable:
    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("not to be pickled")


def test_records_of_torch_xla_are_read_and_run_no_code(tmp_path, caplog):
    former = type("_CheckpointMetadata", (), {"__module__": __name__})
    globals()["_CheckpointMetadata"] = former
    record = former()
    record.step, record.ts = 40, datetime.datetime(2024, 5, 1)
    for name, content in (("40", record), ("50", _Harmful(tmp_path / "harm"))):
        save(tmp_path / "run" / name, {"t": torch.full((2,), 4.0)})
        (tmp_path / "run" / name / storage.RECORD).write_bytes(pickle.dumps(content))
    found = manager(tmp_path / "run")
    assert found.all_steps() == [40] and not (tmp_path / "harm").exists()
    assert "not complete checkpoints: ['50']" in caplog.text
    t = torch.zeros(2)
    found.restore(40, {"t": t})
    assert t.tolist() == [4, 4]


class _Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return type(self.path).touch, (self.path,)


def test_checkpoints_anywhere_that_fsspec_knows(mesh):
    t = split(mesh, ("data",), torch.ones(8))
    saver = manager("memory://somewhere/run", max_to_keep=1)
    saver.save(10, {"t": t})
    saver.save(20, {"t": t * 3})
    assert fsspec.filesystem("memory").exists("/somewhere/run/20")
    assert not fsspec.filesystem("memory").exists("/somewhere/run/10")
    found = manager("memory://somewhere/run")
    assert found.all_steps() == [20]
    found.restore(20, {"t": t})
    assert t.cpu().tolist() == [3] * 8


@pytest.mark.parametrize("local", [True, False], ids=["file", "memory"])
def test_only_files_of_this_machine_are_synced(mesh, monkeypatch, tmp_path, local):
    """Elsewhere torch 2.13 would have all disks synced instead, and torch 2.15 would warn."""
    synced, everything = [], []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (synced.append(number), fsync(number)))
    monkeypatch.setattr(os, "sync", lambda: everything.append(True))
    t = split(mesh, ("data",), torch.ones(8))
    saver = manager(f"file://{tmp_path}/run" if local else "memory://synced/run")
    saver.save(10, {"t": t * 5})
    saver.restore(10, {"t": t})
    assert t.cpu().tolist() == [5] * 8
    assert bool(synced) == local
    assert not everything


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ({"interval": 0}, "save_interval is 0; it has to be at least 1"),
        ({"max_to_keep": -1}, "max_to_keep is -1"),
        ({"max_pending_async": 0}, "max_pending_async is 0"),
    ],
)
def test_numbers_are_checked(tmp_path, numbers, problem):
    with pytest.raises(ValueError, match=problem):
        manager(tmp_path, **numbers)


def test_signals_are_for_the_main_thread(tmp_path):
    caught = []

    def work():
        try:
            manager(tmp_path, chkpt_on_preemption=True)
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "has to be made in the main thread" in caught[0]
    with pytest.raises(RuntimeError, match="chkpt_on_preemption=False and does not know"):
        manager(tmp_path).reached_preemption(1)


PROCESS = """
    import os, signal, sys
    import numpy as np, torch, torch_xla, torch.distributed as dist
    import torch_xla.runtime as xr
    import torch_xla.distributed.spmd as xs
    from torch_xla.experimental.distributed_checkpoint import CheckpointManager

    xr.use_spmd()
    rank = xr.process_index()
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
    mesh = xs.Mesh(np.arange(8), (4, 2), ("data", "model"))
    values = torch.arange(64.0).reshape(8, 8)

    def state():
        a, b = values.to("xla"), values.to("xla")
        return {"a": xs.mark_sharding(a, mesh, ("data", "model")),
                "b": xs.mark_sharding(b, mesh, (None, "model")), "whole": values.to("xla")}

    saver = CheckpointManager("run", 100)
    for step in range(1, 5):
        if step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if saver.save_async(step, state()):
            print("SAVED", step)
    saver.join()
    found = state()
    for tensor in found.values():
        tensor.zero_()
    CheckpointManager("run", 100).restore(3, found)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.cpu(), values)
    dist.barrier()
    print("RESTORED", saver.all_steps())
"""


def test_two_processes_write_one_checkpoint_when_one_is_asked_to_end(run_hosts, port, tmp_path):
    for output in run_hosts("-c", textwrap.dedent(PROCESS), f"tcp://127.0.0.1:{port}"):
        said = [line for line in output.splitlines() if line.startswith(("SAVED", "RESTORED"))]
        # asked once, each later step is due as well
        assert said == ["SAVED 3", "SAVED 4", "RESTORED [3, 4]"]
    metadata = dcp.FileSystemReader(tmp_path / "run" / "3").read_metadata().state_dict_metadata
    assert [len(metadata[name].chunks) for name in ("a", "b", "whole")] == [8, 2, 1]


WITHOUT_GROUP = """
    import os, signal, time
    import torch, torch_xla, torch_xla.runtime as xr
    from torch_xla import _XLAC

    xr.use_spmd()
    rank = xr.process_index()
    for round in range(2):
        _XLAC._activate_preemption_sync_manager()
        step, first = 0, None
        while first is None:
            step += 1
            time.sleep(0.005 if rank else 0.02)  # one goes ahead, but not so far that the other must run after it
            if step == 5 and rank == round:
                os.kill(os.getpid(), signal.SIGTERM)
            first = step if _XLAC._sync_point_reached(step) else None
        print("FIRST", first, _XLAC._sync_point_reached(step + 1))
        _XLAC._deactivate_preemption_sync_manager()
"""


def test_processes_without_a_group_agree_on_a_step_through_the_coordination_service(run_hosts):
    """Whether the one that is asked to end is ahead of the others, or behind them."""
    first, second = (
        [line.split() for line in output.splitlines() if line.startswith("FIRST")]
        for output in run_hosts("-c", textwrap.dedent(WITHOUT_GROUP))
    )
    assert first == second and len(first) == 2
    assert all(int(step) >= 5 and after == "True" for _, step, after in first)


def test_one_process_asked_to_end_takes_a_checkpoint(run_python):
    found = run_python(
        """
        import os, signal, torch, torch_xla.runtime as xr
        from torch_xla.experimental.distributed_checkpoint import CheckpointManager
        xr.use_spmd()
        signal.signal(signal.SIGTERM, lambda *_: print("told"))
        saver = CheckpointManager("run", 100)
        t = torch.ones(2).to("xla")
        print(saver.save(1, {"t": t}))
        os.kill(os.getpid(), signal.SIGTERM)
        print(saver.save(2, {"t": t}), saver.all_steps(), saver.reached_preemption(3))
        """
    )
    assert found.splitlines() == ["False", "told", "True [2] True"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # nothing of this here
