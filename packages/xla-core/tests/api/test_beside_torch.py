"""What of torch itself still works, on CPU tensors, once ``torch_xla`` is imported."""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _foreach_utils

import torch_xla  # noqa: F401 - it is what torch is looked at after

# Those whose source TorchScript takes in torch 2.11 to 2.15. It cannot compile nadam, radam and muon.
SCRIPTABLE = ("adadelta", "adagrad", "adam", "adamax", "asgd", "rmsprop", "rprop", "sgd")

REPLACED = [
    (torch, "compile"),
    (torch.autograd, "_engine_run_backward"),
    (torch.random, "_seed_custom_device"),
    (_foreach_utils, "_get_foreach_kernels_supported_devices"),
    (_foreach_utils, "_get_fused_kernels_supported_devices"),
    (sys.modules["torch.optim.optimizer"], "_get_capturable_supported_devices"),
    (sys.modules["torch.optim.adam"], "_get_capturable_supported_devices"),
]


@functools.cache
def scriptable_without_us() -> list[str]:
    """Those of ``SCRIPTABLE`` that TorchScript compiles in a process without the device."""
    script = f"""
import contextlib, importlib, torch
for name in {SCRIPTABLE}:
    module = importlib.import_module("torch.optim." + name)
    with contextlib.suppress(RuntimeError):
        torch.jit.script(getattr(module, "_single_tensor_" + name))
        print(name)
"""
    alone = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, env=alone, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("name", SCRIPTABLE)
def test_torchscript_compiles_the_functions_of_torchs_optimizers(name: str) -> None:
    if name not in scriptable_without_us():
        pytest.skip("torch alone cannot: torch 2.15 annotates most with a Union, on Python 3.13")
    module = importlib.import_module(f"torch.optim.{name}")
    script: Any = torch.jit.script  # torch marks it untyped
    assert script(getattr(module, f"_single_tensor_{name}")).graph


def test_the_list_of_capturable_devices_has_xla_in_torchscript_too() -> None:
    listed = sys.modules["torch.optim.adam"]._get_capturable_supported_devices  # type: ignore[attr-defined]
    script: Any = torch.jit.script
    assert "xla" in listed() and "xla" in listed(supports_xla=False)
    assert script(listed)() == ["cuda", "xpu", "hpu", "xla"]


@pytest.mark.parametrize(("module", "name"), REPLACED)
def test_functions_of_torch_are_pickled_under_their_names(module: Any, name: str) -> None:
    function = getattr(module, name)
    assert pickle.loads(pickle.dumps(function)) is function


def test_they_are_pickled_too_where_the_device_is_not_loaded_with_torch() -> None:
    listed = [(module.__name__, name) for module, name in REPLACED]
    script = f"""
import pickle, sys, torch
import torch_xla
assert torch.autograd._engine_run_backward.__code__.co_filename.endswith("torch_private.py")
for module, name in {listed}:
    function = getattr(sys.modules[module], name)
    assert pickle.loads(pickle.dumps(function)) is function
"""
    alone = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], env=alone, check=True)


def test_torchs_sharded_optimizer_trains_after_the_import(
    run_python: Callable[..., str],
) -> None:
    script = """
import tempfile, torch, torch_xla, torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
model = torch.nn.Linear(2, 1)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.5)
before = model.bias.item()
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
dist.destroy_process_group()
print(round(before - model.bias.item(), 3))
"""
    assert run_python(script).strip() == "0.5"  # Adam's first step is lr in the gradient's sign
