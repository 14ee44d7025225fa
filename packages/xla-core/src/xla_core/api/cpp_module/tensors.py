"""Names of torch_xla's C++ module ``_XLAC`` that create, move and compute single tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final, Protocol

import torch
from jax import ffi

import xla_core.torch_bridge.marking_ops  # noqa: F401 - PyTorch learns of the operators there
from xla_core.api.hlo_text_names import shape_text
from xla_core.dispatch.transfers import across, read
from xla_core.execution import runtime
from xla_core.kernels.dot_general import dot_general as _xla_dot_general
from xla_core.kernels.quantized_values import cast_int4 as _xla_cast_int4
from xla_core.kernels.quantized_values import dequantize_tensor as _xla_dequantize_tensor
from xla_core.kernels.quantized_values import quantize_tensor as _xla_quantize_tensor
from xla_core.operators.tensor_meta import tensor_meta
from xla_core.recording.xla_tensor import XLATensor
from xla_core.torch_features.dlpack import from_dlpack as _from_dlpack
from xla_core.torch_features.dlpack import to_dlpack as _to_dlpack
from xla_core.torch_features.optimization_barrier import (
    optimization_barrier_ as _xla_optimization_barrier_,
)
from xla_core.torch_features.ready_callbacks import when_ready as _on_ready_callback
from xla_core.torch_features.syncfree_optimizers import adam_step_ as _xla_adam_optimizer_step_
from xla_core.torch_features.syncfree_optimizers import sgd_step_ as _xla_sgd_optimizer_step_

MSG_NOT_XLA: Final = "Input tensor is not an XLA tensor: {type}"
MSG_DEVICES: Final = (
    "{tensors} tensors, {devices} devices and {specs} shardings; give one of each for every tensor"
)
MSG_REPLACE: Final = (
    "_replace_xla_tensor: a tensor of shape {got} and dtype {got_dtype} cannot replace one of shape {shape} and "
    "dtype {dtype}"
)
MSG_BOUNDARY: Final = (
    "{text!r} does not describe a boundary: give name, pos, id and is_input as JSON"
)


def _on_xla(tensor: torch.Tensor) -> XLATensor:
    if not isinstance(tensor, XLATensor):
        raise RuntimeError(MSG_NOT_XLA.format(type=torch.Tensor.type(tensor)))
    return tensor


class Sending(Protocol):
    """How a CPU tensor is split over devices when it is sent: ``XlaShardingSpec`` or ``xs.ShardingSpec``."""

    def send(self, tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """A copy of the CPU tensor ``tensor`` on ``device``."""
        ...


def _xla_tensors_from_aten(
    tensors: Sequence[torch.Tensor],
    devices: Sequence[str],
    shardings: Sequence[Sending | None] | None = None,
) -> list[torch.Tensor]:
    """A copy of each CPU tensor on the device of the same position, with the same ``requires_grad``.

    ``shardings`` (default: none) has for each tensor how it is split, or None. Raises RuntimeError unless there is
    one device and one sharding per tensor.
    """
    specs = list(shardings) if shardings else [None] * len(tensors)
    if not len(tensors) == len(devices) == len(specs):
        text = MSG_DEVICES.format(tensors=len(tensors), devices=len(devices), specs=len(specs))
        raise RuntimeError(text)
    tensors_on_device = []
    for tensor, name, spec in zip(tensors, devices, specs, strict=True):
        device, plain = runtime.trace_of(name).device, tensor.detach()
        sent = plain.to(device) if spec is None else spec.send(plain, device)
        tensors_on_device.append(sent.requires_grad_(tensor.requires_grad))
    return tensors_on_device


def _xla_get_cpu_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the tensors on the CPU, with their ``requires_grad``; pending values are computed."""
    copies = []
    for tensor in tensors:
        host = read(tensor.detach()) if isinstance(tensor, XLATensor) else tensor.detach()
        copies.append(host.requires_grad_(tensor.requires_grad))
    return copies


def _replace_xla_tensor(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Write the value of ``source`` to ``target``, without autograd, and return ``target``.

    Views of ``target`` see the new value. Raises RuntimeError if shapes or dtypes differ.
    """
    old, new = _on_xla(target), _on_xla(source)
    if old.shape != new.shape or old.dtype != new.dtype:
        text = MSG_REPLACE.format(
            got=tuple(new.shape), got_dtype=new.dtype, shape=tuple(old.shape), dtype=old.dtype
        )
        raise RuntimeError(text)
    trace = old._s.trace
    if new._s.trace is not trace:
        new = across(new, trace)
    with trace.lock:
        trace.write(old, trace.value_of(new))
    return target


def _get_xla_tensor_shape_type(tensor: torch.Tensor) -> str:
    """XLA's name of a tensor's element type, such as ``'f16'``."""
    return shape_text(tensor_meta((), _on_xla(tensor).dtype)).partition("[")[0]


def _xla_mark_tensor(tensor: torch.Tensor, info: str) -> torch.Tensor:
    """Mark ``tensor`` as an operand or result of a composite; use the returned tensor from here on.

    ``info`` is a JSON object with ``name``, ``id``, ``pos``, ``is_input``, and for a result ``attr``; see
    ``StableHLOCompositeBuilder``. Raises RuntimeError if one of the first four is missing.
    """
    try:
        fields = json.loads(info)
        position, is_input = int(fields["pos"]), bool(fields["is_input"])
        name, number, attributes = str(fields["name"]), str(fields["id"]), fields.get("attr")
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeError(MSG_BOUNDARY.format(text=info)) from error
    items = tuple(attributes.items()) if attributes else None
    marked: torch.Tensor = torch.ops.xla.mark_tensor(
        tensor, name, position, number, is_input, items
    )
    return marked


def _xla_dynamic_expand(
    input: torch.Tensor, size: Sequence[int], src: torch.Tensor, src_dim: int, target_dim: int
) -> torch.Tensor:
    """``input.expand(size)``, where entry ``target_dim`` of ``size`` is the size of ``src`` along ``src_dim``."""
    sizes = list(size)
    sizes[target_dim] = src.shape[src_dim]
    return input.expand(sizes)


def _xla_dynamic_view(
    input: torch.Tensor,
    size: Sequence[int],
    src: torch.Tensor,
    src_dim: int,
    target_dim: int,
    mul_scaler: float = 1.0,
) -> torch.Tensor:
    """``input.view(size)``, where entry ``target_dim`` of ``size`` is ``mul_scaler * src.shape[src_dim]``."""
    sizes = list(size)
    sizes[target_dim] = int(src.shape[src_dim] * mul_scaler)
    return input.view(sizes)


def _xla_register_custom_call_target(name: str, target: object, platform: str = "CPU") -> None:
    """Register the function in the capsule ``target`` for custom calls ``name`` on ``platform``.

    ``platform`` is ``'CPU'`` or ``'CUDA'``. The function is a C function ``void f(void* result, const void**
    operands)``, XLA's untyped form of custom calls, and must live as long as the process. For typed handlers use
    ``jax.ffi.register_ffi_target``.
    """
    ffi.register_ffi_target(name, target, platform.lower(), api_version=0)


__all__ = [
    "_from_dlpack", "_get_xla_tensor_shape_type", "_on_ready_callback", "_replace_xla_tensor",
    "_to_dlpack", "_xla_adam_optimizer_step_", "_xla_cast_int4", "_xla_dequantize_tensor",
    "_xla_dot_general", "_xla_dynamic_expand", "_xla_dynamic_view", "_xla_get_cpu_tensors",
    "_xla_mark_tensor", "_xla_optimization_barrier_", "_xla_quantize_tensor",
    "_xla_register_custom_call_target", "_xla_sgd_optimizer_step_",
    "_xla_tensors_from_aten",
]  # fmt: skip
