"""Calls of code by its name, and marks of where composites begin and end."""

from __future__ import annotations

import json

import torch
from jax import Array

from xla_core.jax_bridge import custom_call_primitives
from xla_core.operators.lowering_registry import rule
from xla_core.torch_bridge.dtypes import numpy_dtype
from xla_core.torch_bridge.marking_ops import result_specs, results_of
from xla_core.torch_bridge.operands import Operand

_PLACEMENT = "annotate_device_placement"


@rule(torch.ops.xla.custom_call.default, meta=results_of)
def custom_call(
    args: list[Array],
    call_target: str,
    sizes: list[int],
    ranks: list[int],
    dtypes: str,
    has_side_effect: bool,
    backend_config: str,
    api_version: int,
    frontend_attributes: list[str],
) -> list[Array]:
    """``stablehlo.custom_call`` of ``call_target``."""
    texts = iter(frontend_attributes)  # names and values in turn
    results = [(s, numpy_dtype(d)) for s, d in result_specs(sizes, ranks, dtypes)]
    return custom_call_primitives.custom_call(
        call_target,
        args,
        results,
        has_side_effect=has_side_effect,
        backend_config=backend_config,
        api_version=api_version,
        frontend_attributes=dict(zip(texts, texts, strict=True)),
    )


def _placed(value: Array, memory: str) -> Array:
    # how XLA's offloading passes are told of a value's memory
    (result,) = custom_call_primitives.custom_call(
        _PLACEMENT,
        [value],
        [(value.shape, value.dtype)],
        has_side_effect=True,
        frontend_attributes={"_xla_buffer_placement": memory},
    )
    return result


@rule(torch.ops.xla.place_to_host.default)
def place_to_host(t: Array) -> Array:
    """``t``, in the host's memory."""
    return _placed(t, "pinned_host")


@rule(torch.ops.xla.place_to_device.default)
def place_to_device(t: Array) -> Array:
    """``t``, in the device's memory."""
    return _placed(t, "device")


def _like(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x)


@rule(torch.ops.xla.mark_tensor.default, meta=_like, whole_step=True)
def mark_tensor(
    x: Array, name: str, pos: int, id: str, is_input: bool, attr: Operand = None
) -> Array:
    """``x``, marked as an operand or result of the composite ``name``."""
    attributes = None if attr is None else dict(attr)
    return custom_call_primitives.mark(
        x, custom_call_primitives.Mark(name, pos, id, is_input, json.dumps(attributes))
    )
