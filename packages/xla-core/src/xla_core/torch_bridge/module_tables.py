"""The tables in which torch keeps a module's parameters, buffers, submodules and hooks (torch 2.13)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch.nn.modules import module as module_of_torch
from torch.utils.hooks import RemovableHandle

from xla_core.torch_bridge.operands import Operand

_MODULE_HOOKS: Final = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_OPTIMIZER_HOOKS: Final = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
_OPTIMIZER: Final = frozenset({
    "state", "param_groups", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_opt_called",
})  # fmt: skip
_TENSOR_HOOKS: Final = "_backward_hooks", "_post_accumulate_grad_hooks"
_GLOBAL_HOOKS: Final = tuple(f"_global{name}" for name in _MODULE_HOOKS)


def tensor_tables(module: torch.nn.Module) -> tuple[dict[str, object], ...]:
    """The module's parameters and its buffers, by name."""
    return module._parameters, module._buffers


def submodules(module: torch.nn.Module) -> dict[str, object]:
    """The modules right inside a module, by name."""
    return module._modules


def hooks_registered() -> int:
    """A number that rises whenever a hook is registered anywhere."""
    return RemovableHandle.next_id


def hook_tables(
    modules: Iterable[torch.nn.Module],
    optimizers: Iterable[object],
    tensors: Iterable[torch.Tensor],
) -> list[tuple[object, ...]]:
    """What the hooks of these objects are now, in their order, torch's hooks of all modules first."""
    tables = [_hooks(getattr(module_of_torch, name)) for name in _GLOBAL_HOOKS]
    tables += [_hooks(getattr(m, name)) for m in modules for name in _MODULE_HOOKS]
    tables += [_hooks(getattr(o, name)) for o in optimizers for name in _OPTIMIZER_HOOKS]
    tables += [_hooks(getattr(t, name, None)) for t in tensors for name in _TENSOR_HOOKS]
    return tables


def is_schedulers_wrapper(value: object) -> bool:
    """Whether it is what a scheduler puts in place of ``optimizer.step``, to notice that it was called."""
    return getattr(value, "_wrapped_by_lr_sched", False) is True


def is_optimizer(value: object) -> bool:
    """Whether it is an optimizer, and not a wrapper of one that only says so, as accelerate's is."""
    return isinstance(value, torch.optim.Optimizer) and hasattr(value, _OPTIMIZER_HOOKS[0])


def own_attributes(optimizer: torch.optim.Optimizer) -> list[str]:
    """The attributes of an optimizer that its class has added to those of every optimizer of torch's."""
    return [
        key
        for key in vars(optimizer)
        if key not in _OPTIMIZER and not key.startswith("_optimizer_")
    ]


def _hooks(table: Operand) -> tuple[object, ...]:
    return () if not table else tuple(table.values())
