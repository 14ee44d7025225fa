"""What the tests of xla-core share: the device they run on, and Python programs of their own."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from xla_core.api import program_report
from xla_core.dispatch import cpu_fallback
from xla_core.execution import runtime
from xla_core.operators import lowering_registry
from xla_core.recording import xla_tensor
from xla_core.support import counters

# What would change the meaning of a test if it came from the developer's own environment.
_CLEARED = ("XLA_", "CPU_NUM_DEVICES", "TORCH_DEVICE_BACKEND_AUTOLOAD", "PJRT_DEVICE")

# Before anything starts a client: a machine with a TPU runs these tests on its CPU too, unless it is told to
# run them on another device (tools/gpu_runs.py does; what XLA's allocator is told is left there, then).
_DEVICE = os.environ.get("TEST_PJRT_DEVICE", "CPU")
_KEPT = ("XLA_PYTHON_CLIENT_", "XLA_CLIENT_") if _DEVICE != "CPU" else ()
for name in [name for name in os.environ if name.startswith(_CLEARED)]:
    if not name.startswith(_KEPT):
        del os.environ[name]
os.environ["PJRT_DEVICE"] = _DEVICE

# The CPU's results are small: several workers' threads would only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def new_step():
    """What an earlier test left pending is no part of this one's steps."""
    if runtime.started():
        for trace in runtime.traces():
            trace.flush(trace)


@pytest.fixture(autouse=True)
def warn_again(monkeypatch):
    """An operator's fallback is warned about once in a process: here, once in a test."""
    monkeypatch.setattr(cpu_fallback, "_warned", set())


@pytest.fixture
def replace_rule(monkeypatch):
    """A function that lets the lowering rule of an operator be ``change(its function)`` in this test."""

    def replace(overload, change):
        rule = lowering_registry.find_rule(overload)
        changed = dataclasses.replace(rule, function=change(rule.function))
        monkeypatch.setitem(lowering_registry._rules, overload, changed)
        # handlers have the rule that there was when they were made
        monkeypatch.setattr(xla_tensor, "handlers", {})
        monkeypatch.setattr(xla_tensor, "_plain", {})

    return replace


@pytest.fixture
def compile_count():
    """A function that says how many programs this process has compiled.

    What earlier tests left in reference cycles would be part of the first step that is counted.
    """
    gc.collect()
    for trace in runtime.traces():
        trace.flush(trace)
    return lambda: counters.all_counters().get("UncachedCompile", 0)


@pytest.fixture
def fallbacks():
    """A function that says which operators ran on the CPU since the test began, and how often."""
    before = program_report.fallback_counts()
    return lambda: {
        name: count - before.get(name, 0)
        for name, count in program_report.fallback_counts().items()
        if count > before.get(name, 0)
    }


@pytest.fixture
def run_python(tmp_path, program_servers):
    """Run a program in a process of its own, in ``tmp_path``; its output, or with ``fails`` its error.

    The process has torch and jax already: what looks at imports takes ``run_interpreter``.
    """

    def run(code, *, fails=False, timeout=240, **environment):
        server = next(program_servers)
        code, wanted = textwrap.dedent(code), _clean_environment(environment)
        result = server.run(code, cwd=str(tmp_path), environment=wanted, timeout=timeout)
        return _printed(result, fails)

    return run


@pytest.fixture
def run_interpreter(tmp_path):
    """As ``run_python``, in a new interpreter, which takes seconds more: for what looks at imports."""

    def run(code, *, fails=False, timeout=240, **environment):
        command = [sys.executable, "-c", textwrap.dedent(code)]
        wanted = _clean_environment(environment)
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, cwd=tmp_path, env=wanted
        )
        return _printed(result, fails)

    return run


def _clean_environment(added):
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(_CLEARED) or k.startswith(_KEPT)
    }
    return {**inherited, "PJRT_DEVICE": _DEVICE, "OMP_NUM_THREADS": "1", **added}


def _printed(result, fails):
    assert (result.returncode != 0) == fails, result.stdout + result.stderr
    # A Python exception exits with 1; an abort or a crash does not.
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return result.stderr if fails else result.stdout


BLOCKS = """
    import json, torch, torch_xla
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x):
            hidden = nn.functional.gelu(self.up(self.norm(x)))
            return x + self.dropout(self.down(hidden))
"""


@pytest.fixture
def blocks():
    """What scripts that train repeated blocks begin with."""
    return BLOCKS
