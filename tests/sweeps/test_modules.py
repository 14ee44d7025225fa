"""Every module of PyTorch's own module database: one forward and backward pass on ``xla``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from torch.utils import _pytree

import torch_xla
from xla_core.testing.against_cpu import assert_same, copy_to, fallbacks, gradients

pytestmark = [
    pytest.mark.sweep,
    # Fallbacks are asserted by their counters; what modules warn about on the CPU is not ours.
    pytest.mark.filterwarnings("ignore"),
]

# What runs on the CPU, by module. Anything else that does fails the sweep.
FALLBACKS: dict[str, set[str]] = {}


def without_randomness(module: torch.nn.Module) -> torch.nn.Module:
    """Dropout of probability zero: the two devices draw different numbers."""
    for part in module.modules():
        if isinstance(part, torch.nn.modules.dropout._DropoutNd):
            part.p = 0.0
        elif isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0
    return module


def inputs_of(info: ModuleInfo, training: bool) -> list[ModuleInput]:
    torch.manual_seed(0)
    found = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
    )
    return [given for given in found if given.forward_input is not None]


def prepared(info: ModuleInfo, given: ModuleInput, training: bool) -> torch.nn.Module:
    torch.manual_seed(1)
    made = given.constructor_input
    module = without_randomness(info.module_cls(*made.args, **made.kwargs).train(training))
    if info.is_lazy:
        module(*given.forward_input.args, **given.forward_input.kwargs)
    return module.to(torch.float32)


def pass_through(module: torch.nn.Module, given: ModuleInput, device: str) -> list[Any]:
    """The results, the gradients by all parameters and inputs, and the buffers afterwards."""
    module = copy.deepcopy(module).to(device)
    args, kwargs = copy_to((given.forward_input.args, given.forward_input.kwargs), device)
    tensors = [t for t in _pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    wanted = [t for t in (*module.parameters(), *tensors) if t.requires_grad]
    result = module(*args, **kwargs)
    return [result, gradients(result, wanted), list(module.buffers())]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_module(info: ModuleInfo, training: bool) -> None:
    pairs = []
    with fallbacks() as ran_on_cpu:
        for given in inputs_of(info, training):
            module = prepared(info, given, training)
            pairs.append([pass_through(module, given, device) for device in ("cpu", "xla")])
            torch_xla.sync()
    assert pairs, "the database has no input for this module"
    for expected, got in pairs:
        assert_same(got, expected)
    assert ran_on_cpu.keys() <= FALLBACKS.get(info.name, set())
