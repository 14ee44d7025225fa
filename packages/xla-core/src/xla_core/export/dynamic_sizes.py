"""Sizes that depend on other tensors' sizes, in functions and in exported programs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

from xla_core.contract.foreign_values import AnyFunction
from xla_core.export.symbols import is_dynamic
from xla_core.torch_bridge.operands import Operand, Tree


def dynamic_expand(
    input: torch.Tensor,
    size: Sequence[object],
    src_tensor: torch.Tensor,
    src_dim: int,
    target_dim: int,
) -> torch.Tensor:
    """``input.expand(size)``, where entry ``target_dim`` is the size of ``src_tensor`` along ``src_dim``."""
    return input.expand(_with(size, target_dim, src_tensor.shape[src_dim]))


def dynamic_view(
    input: torch.Tensor,
    size: Sequence[object],
    src_tensor: torch.Tensor,
    src_dim: int,
    target_dim: int,
    mul_scaler: int,
) -> torch.Tensor:
    """``input.view(size)``, where entry ``target_dim`` is ``mul_scaler * src_tensor.shape[src_dim]``."""
    return input.view(_with(size, target_dim, src_tensor.shape[src_dim] * mul_scaler))


def _with(size: Sequence[object], dim: int, value: int) -> list[object]:
    sizes = list(size)
    sizes[dim] = value
    return sizes


def exported_program_has_symbolic_input_shape(ep: ExportedProgram) -> bool:
    """Whether an argument of an exported program has a dynamic dimension."""
    names = set(ep.graph_signature.user_inputs)
    inputs = [n for n in ep.graph.nodes if n.op == "placeholder" and n.name in names]
    values = [n.meta.get("val") for n in inputs]
    return any(isinstance(v, torch.Tensor) and any(map(is_dynamic, v.shape)) for v in values)


def process_exported_program_with_symbolic_input(ep: ExportedProgram) -> ExportedProgram:
    """Return ``ep``, unchanged: the lowering to StableHLO supports symbolic sizes."""
    return ep


def extract_custom_call_outputs_shape_dtype(
    n: Node,
) -> tuple[list[torch.Size], list[torch.dtype]]:
    """The shapes and dtypes of an FX node's results, from its metadata."""
    value = n.meta["val"]
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v.shape for v in values], [v.dtype for v in values]


def wrap_func_as_nn_module(f: AnyFunction) -> nn.Module:
    """A module in evaluation mode whose ``forward`` calls ``f``, as ``torch.export`` takes modules only."""

    class Wrapped(nn.Module):
        def forward(self, *args: Operand) -> Tree:
            return f(*args)

    return Wrapped().eval()
