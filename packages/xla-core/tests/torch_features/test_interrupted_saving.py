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
from xla_core.testing.interrupts import Again, Interrupt, Interrupted, Passed


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


@pytest.mark.filterwarnings("ignore:.*unclosed file:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("name", SAVES)
def test_saving_what_is_pending(name, tmp_path):
    """At each bytecode of what is ours: the writing of the file, or with torch.save the reading of tensors."""
    path, save = tmp_path / "state.pt", SAVES[name]
    weight = torch.arange(4.0).to("xla")

    def step():
        weight.add_(1)
        save({"weight": weight, "view": weight[1:], "step": 3}, path)

    for _ in range(3):
        step()
    with Passed() as passed:
        step()
    places = [
        place
        for place in passed.places(("first",))
        if place[0].co_filename.endswith(
            ("saving.py", "atomic_file.py") if name == "xm.save" else "transfers.py"
        )
    ]
    assert len(places) > 20
    files, rights = open_files(), mask()
    for place in places:
        before = weight.cpu()
        stored = torch.load(path)["weight"].cpu()
        try:
            with Interrupt(*place, lines=False):
                step()
        except Interrupted as interrupted:
            where = str(interrupted)
        else:
            continue
        assert any(torch.equal(weight.cpu(), one) for one in (before, before + 1)), where
        found = torch.load(path)["weight"].cpu()
        assert any(torch.equal(found, one) for one in (stored, before + 1)), where
        assert mask() == rights, where
        step()
        assert torch.equal(torch.load(path)["view"].cpu(), weight.cpu()[1:]), where
        assert [p.name for p in tmp_path.iterdir()] == ["state.pt"], where
    assert open_files() <= files + 1


@pytest.mark.parametrize("load", [torch.load, xser.load], ids=["torch", "xser"])
def test_loading_into_tensors_that_are_there(load, tmp_path):
    """Each parameter is old or new; what is loaded next is all there."""
    path = tmp_path / "state.pt"
    net = torch.nn.Linear(3, 2).to("xla")
    old = {name: value.cpu().clone() for name, value in net.state_dict().items()}
    new = {name: value + 1 for name, value in old.items()}
    xm.save(new, path)

    def step():
        net.load_state_dict(load(path))
        torch_xla.sync()

    step()
    with Passed(lines=True) as passed:
        step()
    fired = 0
    for place in passed.places():
        net.load_state_dict(old)
        try:
            with Interrupt(*place, lines=True):
                step()
        except Interrupted as interrupted:
            fired += 1
            for name, value in net.state_dict().items():
                known = old[name], new[name]
                assert any(torch.equal(value.cpu(), one) for one in known), (interrupted, name)
        step()
        assert all(torch.equal(value.cpu(), new[name]) for name, value in net.state_dict().items())
    assert fired > 20


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


@pytest.mark.filterwarnings("ignore:.*unclosed file:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("name", SAVES)
def test_a_second_interrupt_on_the_way_out_of_saving(name, tmp_path):
    path, save = tmp_path / "state.pt", SAVES[name]
    weight = torch.arange(4.0).to("xla")

    def step():
        weight.add_(1)
        save({"weight": weight, "view": weight[1:], "step": 3}, path)

    def check(before, where):
        value, stored = before
        assert any(torch.equal(weight.cpu(), one) for one in (value, value + 1)), where
        found = torch.load(path)["weight"].cpu()
        assert any(torch.equal(found, one) for one in (stored, value + 1)), where
        assert mask() == rights, where
        step()
        assert torch.equal(torch.load(path)["view"].cpu(), weight.cpu()[1:]), where
        assert [p.name for p in tmp_path.iterdir()] == ["state.pt"], where

    for _ in range(3):
        step()
    with Passed(lines=True) as passed:
        step()
    files, rights = open_files(), mask()
    places = passed.places(("first",))
    fired = interrupted_twice(
        step, places, lambda: (weight.cpu(), torch.load(path)["weight"].cpu()), check
    )
    assert fired > 20
    assert open_files() <= files + 1


@pytest.mark.parametrize("load", [torch.load, xser.load], ids=["torch", "xser"])
def test_a_second_interrupt_on_the_way_out_of_loading(load, tmp_path):
    path = tmp_path / "state.pt"
    net = torch.nn.Linear(3, 2).to("xla")
    old = {name: value.cpu().clone() for name, value in net.state_dict().items()}
    new = {name: value + 1 for name, value in old.items()}
    xm.save(new, path)

    def step():
        net.load_state_dict(load(path))
        torch_xla.sync()

    def check(_before, where):
        for name, value in net.state_dict().items():
            known = old[name], new[name]
            assert any(torch.equal(value.cpu(), one) for one in known), (where, name)
        step()
        assert all(torch.equal(value.cpu(), new[name]) for name, value in net.state_dict().items())

    step()
    with Passed(lines=True) as passed:
        step()
    files = open_files()
    places = passed.places(("first",))
    assert interrupted_twice(step, places, lambda: net.load_state_dict(old), check) > 5
    assert open_files() <= files + 1
