"""Exceptions at every line of saving and loading: the file is the old one or the new one, tensors keep values."""

from __future__ import annotations

import gc
import io
import os
import pathlib

import pytest
import torch

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.utils.serialization as xser
from xla_core.testing.interrupts import Again, Interrupt, Interrupted, passed_by


def mask():
    found = os.umask(0o22)
    os.umask(found)
    return found


def open_files():
    gc.collect()  # tracebacks in cycles hold files that nobody closes but the collector
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


def torch_save(state, path):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path.write_bytes(buffer.getvalue())


SAVES = {"xm.save": xm.save, "torch.save": torch_save}


def interrupted_once(step, places, prepare, check, lines):
    """Interrupt ``step`` at each place, a line (``lines``) or a bytecode; how often that came out of it."""
    fired = 0
    for place in places:
        before, where = prepare(), "not passed"
        try:
            with Interrupt(*place, lines):
                step()
        except Interrupted as interrupted:
            fired, where = fired + 1, str(interrupted)
        check(before, where)
    return fired


def interrupted_twice(step, places, prepare, check):
    """Interrupt ``step`` at each place, and once more at each bytecode that only runs because of it."""
    again, fired = Again(), 0
    for place in places:
        for _ in range(200):  # as often as the way out has bytecodes that no second one came at yet
            before = prepare()
            first, where = Interrupt(*place, True), "not passed"
            try:
                with again.after(first), first:
                    step()
            except Interrupted as interrupted:
                where = f"{interrupted.__context__} {interrupted}"
            if not again.where:
                break
            fired += 1
            check(before, where)
    return fired


class Saving:
    """``step()`` changes a tensor and saves it; ``check`` says that both are old or new, and saves again."""

    def __init__(self, save, folder):
        self.save, self.folder, self.path = save, folder, folder / "state.pt"
        self.weight = torch.arange(4.0).to("xla")
        self.rights = mask()
        for _ in range(3):
            self.step()

    def step(self):
        self.weight.add_(1)
        self.save({"weight": self.weight, "view": self.weight[1:], "step": 3}, self.path)

    def before(self):
        return self.weight.cpu(), self.stored("weight")

    def stored(self, name):
        return torch.load(self.path)[name].cpu()

    def check(self, before, where):
        value, stored = before
        assert any(torch.equal(self.weight.cpu(), one) for one in (value, value + 1)), where
        assert any(torch.equal(self.stored("weight"), one) for one in (stored, value + 1)), where
        assert mask() == self.rights, where
        self.step()
        assert torch.equal(self.stored("view"), self.weight.cpu()[1:]), where
        assert [p.name for p in self.folder.iterdir()] == ["state.pt"], where


class Loading:
    """``step()`` loads into the parameters of a module; ``check`` says that each is old or new, and loads again."""

    def __init__(self, load, folder):
        self.load, self.path = load, folder / "state.pt"
        self.net = torch.nn.Linear(3, 2).to("xla")
        self.old = {name: value.cpu().clone() for name, value in self.net.state_dict().items()}
        self.new = {name: value + 1 for name, value in self.old.items()}
        xm.save(self.new, self.path)
        self.step()

    def step(self):
        self.net.load_state_dict(self.load(self.path))
        torch_xla.sync()

    def before(self):
        self.net.load_state_dict(self.old)

    def check(self, _before, where):
        for name, value in self.net.state_dict().items():
            known = self.old[name], self.new[name]
            assert any(torch.equal(value.cpu(), one) for one in known), (where, name)
        self.step()
        for name, value in self.net.state_dict().items():
            assert torch.equal(value.cpu(), self.new[name]), (where, name)


@pytest.mark.filterwarnings("ignore:.*unclosed file:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("name", SAVES)
def test_saving_what_is_pending(name, tmp_path):
    """At each bytecode of what is ours: the writing of the file, or with torch.save the reading of tensors."""
    saving = Saving(SAVES[name], tmp_path)
    passed = passed_by(saving.step)
    ours = ("saving.py", "atomic_file.py") if name == "xm.save" else "transfers.py"
    places = [p for p in passed.places(("first",)) if p[0].co_filename.endswith(ours)]
    assert len(places) > 20
    files = open_files()
    interrupted_once(saving.step, places, saving.before, saving.check, lines=False)
    assert open_files() <= files + 1


@pytest.mark.parametrize("load", [torch.load, xser.load], ids=["torch", "xser"])
def test_loading_into_tensors_that_are_there(load, tmp_path):
    """Each parameter is old or new; what is loaded next is all there."""
    loading = Loading(load, tmp_path)
    passed = passed_by(loading.step, lines=True)
    places = passed.places()
    assert interrupted_once(loading.step, places, loading.before, loading.check, lines=True) > 20


@pytest.mark.filterwarnings("ignore:.*unclosed file:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("name", SAVES)
def test_a_second_interrupt_on_the_way_out_of_saving(name, tmp_path):
    saving = Saving(SAVES[name], tmp_path)
    passed = passed_by(saving.step, lines=True)
    files = open_files()
    places = passed.places(("first",))
    assert interrupted_twice(saving.step, places, saving.before, saving.check) > 20
    assert open_files() <= files + 1


@pytest.mark.parametrize("load", [torch.load, xser.load], ids=["torch", "xser"])
def test_a_second_interrupt_on_the_way_out_of_loading(load, tmp_path):
    loading = Loading(load, tmp_path)
    passed = passed_by(loading.step, lines=True)
    files = open_files()
    places = passed.places(("first",))
    assert interrupted_twice(loading.step, places, loading.before, loading.check) > 5
    assert open_files() <= files + 1
