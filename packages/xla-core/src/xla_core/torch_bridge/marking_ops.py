"""Schemas and meta kernels of the operators for calls by name, memories, marks of composites and donation.

Shapes and dtypes of their results, their gradients, and what they do on other devices. Their lowering rules are
in ``lowering.rules.custom_calls``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.autograd.function import FunctionCtx

from xla_core.torch_bridge.op_library import XLA_LIB
from xla_core.torch_bridge.operands import Gradients

MSG_NOT_XLA: Final = (
    "{name}: a custom call is part of a program for an xla device, and got a tensor on {device}; move "
    "it there first: .to('xla')"
)


def result_specs(
    sizes: Sequence[Any], ranks: Sequence[int], dtypes: str
) -> list[tuple[tuple[Any, ...], torch.dtype]]:
    """Shapes and dtypes of a call's results, from the operator's arguments."""
    remaining = iter(sizes)
    shapes = [tuple(next(remaining) for _ in range(rank)) for rank in ranks]
    kinds = [getattr(torch, name) for name in dtypes.split(",") if name]
    return list(zip(shapes, kinds, strict=True))


def results_of(
    args: list[torch.Tensor], target: str, sizes: Any, ranks: Any, dtypes: str, *_: object
) -> list[torch.Tensor]:
    """Meta tensors like the results of a recorded call."""
    specs = result_specs(sizes, ranks, dtypes)
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in specs]


def _elsewhere(args: list[torch.Tensor], target: str, *_: object) -> object:
    device = next(a.device for a in args if a.device.type != "xla")
    raise RuntimeError(MSG_NOT_XLA.format(name=target, device=device))


XLA_LIB.impl("custom_call", results_of, "Meta")
XLA_LIB.impl("custom_call", _elsewhere, "CPU")


# -- memories --------------------------------------------------------------------------------------


def _same_gradient(_context: FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
    return gradient


def _register(name: str) -> None:
    def elsewhere(t: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(MSG_NOT_XLA.format(name=name, device=t.device))

    XLA_LIB.impl(name, torch.empty_like, "Meta")
    XLA_LIB.impl(name, elsewhere, "CPU")
    torch.library.register_autograd(f"xla::{name}", _same_gradient, lib=XLA_LIB)


_register("place_to_host")
_register("place_to_device")


# -- marks -----------------------------------------------------------------------------------------


def _unmarked(
    x: torch.Tensor, name: str, pos: int, id: str, is_input: bool, attr: object = None
) -> torch.Tensor:
    # an operator's result is no alias of its operand
    return x.clone()


def _like_marked(
    x: torch.Tensor, name: str, pos: int, id: str, is_input: bool, attr: object = None
) -> torch.Tensor:
    return torch.empty_like(x)


def _gradient_of_marked(_context: FunctionCtx, gradient: torch.Tensor) -> Gradients:
    return (gradient, None, None, None, None, None)


XLA_LIB.impl("mark_tensor", _unmarked, "CompositeExplicitAutograd")
XLA_LIB.impl("mark_tensor", _like_marked, "Meta")
torch.library.register_autograd("xla::mark_tensor", _gradient_of_marked, lib=XLA_LIB)


# -- values given away -----------------------------------------------------------------------------


def _as_it_is(t: torch.Tensor, should_donoate: bool) -> torch.Tensor:
    return t


XLA_LIB.impl("dynamo_set_buffer_donor_", _as_it_is, "CompositeExplicitAutograd")
# nothing reads its result, and a graph without it would keep the memory
torch.fx.node.has_side_effect(torch.ops.xla.dynamo_set_buffer_donor_.default)
