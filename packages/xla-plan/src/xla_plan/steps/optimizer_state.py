"""Gives an optimizer its state before the first step, as the planned step is a later one."""

from __future__ import annotations

import copy
from collections import defaultdict

import torch

import torch_xla.distributed.spmd as xs


def fill(optimizer: torch.optim.Optimizer, mesh: xs.Mesh | None) -> None:
    """Give ``optimizer`` the state that it has after one step, unless it has state already.

    The state is found by a step on ``meta`` tensors. State of its parameter's shape is split like the parameter,
    other state is replicated. State that the optimizer keeps on the CPU has its values.
    """
    if optimizer.state:
        return
    twin, pairs = _on_meta(optimizer)
    twin.step()
    for parameter, other in pairs:
        fresh = twin.state.get(other, {})
        optimizer.state[parameter] = {
            name: _placed(value, parameter, mesh) for name, value in fresh.items()
        }


def _on_meta(
    optimizer: torch.optim.Optimizer,
) -> tuple[torch.optim.Optimizer, list[tuple[object, object]]]:
    """A copy of the optimizer with meta parameters and gradients, and the pairs of both kinds of parameters."""
    pairs: list[tuple[object, object]] = []
    groups = []
    for group in optimizer.param_groups:
        others = []
        for parameter in group["params"]:
            other = torch.nn.Parameter(
                torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            )
            other.grad = torch.empty_like(other)
            pairs.append((parameter, other))
            others.append(other)
        groups.append({**group, "params": others})
    twin = copy.copy(optimizer)
    twin.param_groups = groups
    twin.state = defaultdict(dict)
    return twin, pairs


def _placed(value: object, parameter: torch.Tensor, mesh: xs.Mesh | None) -> object:
    if not isinstance(value, torch.Tensor) or value.device.type != "meta":
        return value
    placed = value.to(parameter.device)
    marked = xs.wrap_if_sharded(parameter)
    spec = getattr(marked, "partition_spec", None)
    if mesh is not None and spec is not None and value.shape == parameter.shape:
        xs.mark_sharding(placed, mesh, spec)
    return placed
