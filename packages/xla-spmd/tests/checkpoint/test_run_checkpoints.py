"""``RunCheckpoints`` and ``ResumableLoader`` in one process: what is saved, and what goes on where it was."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

import torch_xla
import torch_xla.distributed.spmd as xs
from torch_xla.experimental.resume import PerProcess, ResumableLoader, RunCheckpoints
from xla_core.contract import checkpoint_marks
from xla_spmd.checkpoint import run_state


def checkpoints(path, **options):
    return RunCheckpoints(str(path), 1, chkpt_on_preemption=False, **options)


class Run:
    """A model with dropout over a mesh, and all that belongs to its training."""

    def __init__(self, mesh=None):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2)).to("xla")
        if mesh is not None:
            xs.mark_sharding(self.model[0].weight, mesh, ("model", None))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        data = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
        self.data = ResumableLoader(data, 8)
        self.state = {
            "model": self.model, "optimizer": self.optimizer, "schedule": self.schedule,
            "data": self.data, "notes": {"best": 1.5},
        }  # fmt: skip

    def steps(self, count):
        """The losses of so many steps, and what was drawn beside them."""
        found = []
        while True:
            for batch in self.data:
                self.optimizer.zero_grad()
                loss = self.model(batch.to("xla")).pow(2).sum()
                loss.backward()
                self.optimizer.step()
                self.schedule.step()
                drawn = random.random(), np.random.rand(), torch.rand(()).item()
                found.append((loss.item(), *drawn, torch.rand((), device="xla").item()))
                if len(found) == count:
                    return found


def test_everything_goes_on_where_it_was(mesh, tmp_path):
    run = Run(mesh)
    run.steps(4)  # into the second epoch
    saver = checkpoints(tmp_path)
    saver.save_async(3, run.state)
    wanted = run.steps(4)
    saver.join()
    random.seed(9)
    torch.manual_seed(9)
    other = Run(mesh)
    other.state["notes"] = None
    assert checkpoints(tmp_path).resume(other.state) == 4
    assert other.steps(4) == wanted
    assert other.state["notes"] == {"best": 1.5} and other.data.epoch == 2
    whole = Run()  # the same on one device, where sums are rounded otherwise
    checkpoints(tmp_path).resume(whole.state)
    losses = [step[0] for step in whole.steps(4)]
    assert losses == pytest.approx([step[0] for step in wanted], rel=1e-4)


def test_a_run_without_a_checkpoint_is_as_it_was(tmp_path):
    run = Run()
    torch.manual_seed(1)
    assert checkpoints(tmp_path).resume(run.state) == 0
    found = torch.rand(())
    torch.manual_seed(1)
    assert found == torch.rand(()) and not run.optimizer.state


def test_optimizers_that_have_not_stepped_yet_are_read_as_such(tmp_path):
    run = Run()
    checkpoints(tmp_path).save(0, run.state)
    other = Run()
    checkpoints(tmp_path).resume(other.state)
    assert not other.optimizer.state


OPTIMIZERS = {
    # float32 numbers beside bfloat16 parameters, on the host or on the device
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    # no step without a closure, lists of tensors
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
}


class Small:
    """A bfloat16 model, one parameter of which gets no gradient at first."""

    def __init__(self, optimizer):
        torch.manual_seed(3)
        self.model = nn.ModuleList([nn.Linear(4, 4, dtype=torch.bfloat16) for _ in range(2)])
        self.model.to("xla")
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.batch = torch.ones(2, 4, dtype=torch.bfloat16).to("xla")

    def loss(self, layers):
        self.optimizer.zero_grad()
        out = self.batch
        for layer in self.model[:layers]:
            out = layer(out)
        loss = (out - 1).square().sum()
        loss.backward()
        return loss

    def steps(self, count, layers):
        return [self.optimizer.step(lambda: self.loss(layers)).item() for _ in range(count)]

    def bits(self):
        leaves = torch.utils._pytree.tree_leaves(
            [self.model.state_dict(), self.optimizer.state_dict()["state"]]
        )
        return [
            (t.dtype, t.device.type, t.tolist()) if isinstance(t, torch.Tensor) else t
            for t in leaves
        ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_have_every_bit_of_their_state_again(tmp_path, name):
    run, saver = Small(name), checkpoints(tmp_path)
    run.steps(3, layers=1)
    saver.save_async(0, run.state)
    wanted = run.bits()
    saver.join()
    other = Small(name)
    assert checkpoints(tmp_path).resume(other.state) == 1
    assert other.bits() == wanted
    assert other.steps(3, layers=2) == run.steps(3, layers=2)
    assert other.bits() == run.bits()


def test_a_used_optimizer_is_reset_to_the_state_that_was_saved(tmp_path):
    run, saver = Small("NAdam"), checkpoints(tmp_path)
    saver.save(0, run.state)
    run.steps(2, layers=2)
    assert saver.resume(run.state) == 1 and not run.optimizer.state
    run.steps(1, layers=1)
    saver.save(1, run.state)
    run.steps(1, layers=2)
    assert len(run.optimizer.state) == 4
    assert saver.resume(run.state) == 2 and len(run.optimizer.state) == 2


def test_state_for_a_parameter_that_needs_none_is_not_lost_silently(tmp_path):
    run = Small("NAdam")
    run.steps(1, layers=2)
    checkpoints(tmp_path).save(0, run.state)
    other = Small("NAdam")
    other.model[1].requires_grad_(False)
    with pytest.raises(ValueError, match=r"'optimizer' for its parameters \[2, 3\], which need no"):
        checkpoints(tmp_path).resume(other.state)


def test_a_state_that_cannot_be_divided_is_refused(tmp_path):
    run = Small("LBFGS")
    setattr(run.model[0].weight, checkpoint_marks.ROWS_OF, ((8, 4), 0))
    with pytest.raises(ValueError, match=r"state of LBFGS cannot be divided.*PerProcess"):
        checkpoints(tmp_path).save(0, run.state)


def test_what_the_checkpoint_lacks_is_named(tmp_path):
    checkpoints(tmp_path).save(0, {"model": nn.Linear(1, 1)})
    with pytest.raises(KeyError, match=r"nothing of the name 'data'.*'model'"):
        checkpoints(tmp_path).resume({"data": ResumableLoader(torch.zeros(2), 1)})
    with pytest.raises(ValueError, match="random_states"):
        checkpoints(tmp_path).save(1, {"random_states": 1})


def test_the_state_of_each_process_needs_as_many_of_them(tmp_path, monkeypatch):
    loader = ResumableLoader(torch.arange(6), 2)
    next(iter(loader))
    checkpoints(tmp_path).save(0, {"mine": PerProcess(loader)})
    other = ResumableLoader(torch.arange(6), 2)
    checkpoints(tmp_path).resume({"mine": PerProcess(other)})
    assert other.batch == 1
    monkeypatch.setattr(run_state, "place", lambda: (1, 2))
    with pytest.raises(ValueError, match="1 processes wrote it, and 2 cannot read it"):
        checkpoints(tmp_path).resume({"mine": PerProcess(other)})


def test_processes_that_come_later_draw_other_numbers_every_time_the_same():
    states = run_state._random_states()
    one, again, other = (run_state._derived(states, rank) for rank in (1, 1, 2))
    assert one["python"] == again["python"] != other["python"]
    assert torch.equal(one["torch"], again["torch"]) and not torch.equal(
        one["torch"], other["torch"]
    )
    assert one["xla"] == again["xla"] != other["xla"] != states["xla"]
    before = run_state._random_states()
    run_state._set_random_states(one)
    drawn = random.random(), torch.rand(()).item()
    run_state._set_random_states(again)
    assert drawn == (random.random(), torch.rand(()).item())
    run_state._set_random_states(before)


def taken(loader, count):
    found = []
    for batch in loader:
        found.append(batch.tolist())
        if len(found) == count:
            break
    return found


def test_batches_are_taken_up_in_the_middle(monkeypatch):
    def loader(**options):
        return ResumableLoader(torch.arange(10), 4, **options)

    first = loader(wrap=list)  # which reads all ahead
    begun = taken(first, 1)
    second = loader()
    second.load_state_dict(first.state_dict())
    rest = taken(second, 9)
    assert len(loader()) == 2 and begun + rest == taken(loader(), 9)
    items = [item for batch in begun + rest for item in batch]
    assert len(items) == len(set(items)) == 8
    assert second.state_dict()["epoch"] == 1 and taken(second, 2) != begun + rest
    assert taken(loader(shuffle=False), 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="batch_size=4, and batch_size is 5 now"):
        ResumableLoader(torch.arange(10), 5).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="less than one batch of 20"):
        ResumableLoader(torch.arange(10), 20)
    monkeypatch.setattr("xla_core.extension_api.runtime.process_count", lambda: 2)
    parts = []
    for index in range(2):
        monkeypatch.setattr(
            "xla_core.extension_api.runtime.process_index", lambda index=index: index
        )
        parts.append(taken(loader(), 2))
    assert [a + b for a, b in zip(*parts, strict=True)] == begun + rest
    with pytest.raises(ValueError, match="divisible by their number, 2"):
        ResumableLoader(torch.arange(10), 5)


def test_the_loader_draws_nothing_of_the_run():
    torch.manual_seed(0)
    list(ResumableLoader(torch.arange(10), 4))
    found = torch.rand(())
    torch.manual_seed(0)
    assert found == torch.rand(())


def test_the_step_loop_waits_for_the_copy_only(tmp_path, monkeypatch):
    """While the files are written, steps go on, and change nothing of what is written."""

    saver, begin, written = checkpoints(tmp_path), threading.Event(), []
    original = saver._storage.begin

    def waits(step):
        assert begin.wait(60)
        written.append(step)
        return original(step)

    monkeypatch.setattr(saver._storage, "begin", waits)
    run = Run()
    wanted = run.model[0].weight.detach().cpu()
    saver.save_async(0, run.state)
    run.steps(2)
    torch_xla.sync()
    assert not written and not torch.equal(run.model[0].weight.cpu(), wanted)
    begin.set()
    saver.join()
    other = Run()
    with torch.no_grad():
        other.model[0].weight.zero_()
    checkpoints(tmp_path).resume(other.state)
    assert torch.equal(other.model[0].weight.detach().cpu(), wanted)
