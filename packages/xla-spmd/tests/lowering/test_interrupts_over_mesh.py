"""Exceptions at every bytecode of placing tensors over a mesh and of steps over it: no value is lost."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import torch

import torch_xla
import torch_xla.distributed.spmd as xs
import xla_spmd
from xla_core.testing.interrupts import SOURCES, Again, Interrupt, Interrupted, passed_by

OWN = (str(pathlib.Path(xla_spmd.__file__).parent),)
MESH = xs.Mesh(np.arange(8), (4, 2), ("data", "model"))
SPECS = {"w": ("data", "model"), "x": ("model", None), "b": (None, ("data", "model"))}


def fresh():
    """Tensors that no device has yet, of even and uneven parts."""
    values = torch.arange(40.0).reshape(8, 5)
    return {name: (values + i).to("xla") for i, name in enumerate(SPECS)}


def statements(t, host):
    t["w"].mul_(0.5)
    yield
    t["w"].add_(t["x"] * 1.5)
    yield
    t["b"].copy_(t["w"])  # takes over a value that is laid out otherwise
    yield
    t["x"].copy_(host)
    yield


def placed(t, host):
    for name, spec in SPECS.items():
        xs.mark_sharding(t[name], MESH, spec)
    for _ in statements(t, host):
        pass
    torch_xla.sync()


def marked_again(t, host):
    """Values that lie on the devices are laid out otherwise, and back."""
    torch_xla.sync()
    placed(t, host)
    for name in SPECS:
        xs.clear_sharding(t[name])
        xs.mark_sharding(t[name], MESH, ("model", "data"))
    torch_xla.sync()
    for name in SPECS:
        xs.clear_sharding(t[name])


def read(t):
    return {name: value.cpu() for name, value in t.items()}


def history(t, host):
    """All values that the statements give each tensor, the old one first."""
    found = {name: [value.clone()] for name, value in t.items()}
    for _ in statements(t, host):
        for name, value in t.items():
            found[name].append(value.clone())
    return found


def check(where, step, t, before, host):
    held = history(before, host)
    found = read(t)
    for name, value in found.items():
        assert any(torch.allclose(value, one) for one in held[name]), (where, name, value)
    for name in SPECS:
        xs.clear_sharding(t[name])
    step(t, host)
    for _ in statements(found, host):
        pass
    for name, value in read(t).items():
        assert torch.allclose(value, found[name]), (where, name, value)


@pytest.mark.parametrize("step", [placed, marked_again])
def test_interrupted_at_any_bytecode(step):
    host = torch.arange(40.0).reshape(8, 5).cos()
    for _ in range(3):
        step(fresh(), host)
    passed = passed_by(lambda: step(fresh(), host), sources=OWN)
    fired, again = 0, Again(SOURCES + OWN)
    for place in passed.places(("first",)):
        t = fresh()
        before = read(t)
        first = Interrupt(*place, lines=False)
        try:
            with again.after(first), first:
                step(t, host)
        except Interrupted as interrupted:
            where = f"{interrupted.__context__} {interrupted}"
            fired += 1
            check(where, step, t, before, host)
    assert fired > 300
