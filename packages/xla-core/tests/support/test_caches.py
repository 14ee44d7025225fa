"""Clearing the cache of programs empties every cache that is listed."""

from __future__ import annotations

import torch_xla.runtime as xr
from xla_core.compilation import program_table
from xla_core.computations import computation
from xla_core.support import caches


def test_all_that_is_listed_is_emptied(monkeypatch):
    monkeypatch.setattr(caches, "_clearers", [*caches._clearers])
    told = []
    caches.on_clear(lambda: told.append("cleared"))
    monkeypatch.setitem(computation._plans, "of a test", None)
    xr.clear_computation_cache()
    assert told == ["cleared"]
    assert not computation._plans
    assert not program_table.all_programs()
