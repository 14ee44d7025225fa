"""Operators of our own, in PyTorch's namespace ``xla``.

``XLA_LIB`` is the namespace's library: third parties define further operators through it, and register
their lowering rules with ``xla_core.operators.lowering_registry``.

The functions that give the results' shapes and dtypes are registered as kernels for meta tensors. The first
``torch.library.register_fake`` of a process takes 40 ms: it resolves the paths of all imported modules.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._ops import OpOverload

XLA_LIB: Final = torch.library.Library("xla", "DEF")
"""The library that defines the namespace ``torch.ops.xla``."""

XLA_LIB.define("optimization_barrier(Tensor[] tensors) -> Tensor[]")
XLA_LIB.define("computation(Tensor[] tensors, float[] floats, int[] ints) -> Tensor[]")
XLA_LIB.define(
    "custom_call(Tensor[] args, str call_target, SymInt[] sizes, int[] ranks, str dtypes, "
    "bool has_side_effect, str backend_config, int api_version, str[] frontend_attributes) -> Tensor[]"
)
XLA_LIB.define("place_to_host(Tensor t) -> Tensor")
XLA_LIB.define("place_to_device(Tensor t) -> Tensor")
XLA_LIB.define("dynamo_set_buffer_donor_(Tensor t, bool should_donoate) -> Tensor")
XLA_LIB.define(
    "mark_tensor(Tensor x, str name, int pos, str id, bool is_input, Any? attr=None) -> Tensor"
)
XLA_LIB.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale) "
    "-> (Tensor, Tensor)"
)
XLA_LIB.define(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor weights, "
    "float scale) -> (Tensor, Tensor, Tensor)"
)
XLA_LIB.define(
    "batch_norm_inference(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, "
    "Tensor running_var, float eps) -> Tensor"
)


@torch.library.impl(XLA_LIB, "batch_norm_inference", "CompositeExplicitAutograd")
def batch_norm_inference(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """PyTorch's own on the CPU and on meta tensors, of which shapes and errors come."""
    return torch.batch_norm(
        input, weight, bias, running_mean, running_var, False, 0.0, eps, cudnn_enabled=False
    )


_OURS: Final = frozenset({"aten", "prims", "xla"})
# torch 2.13: the keys whose kernels PyTorch calls for xla tensors, the first before the second
_TAKEN: Final = (torch._C.DispatchKey.XLA, torch._C.DispatchKey.CompositeExplicitAutograd)


def is_from_outside(overload: OpOverload) -> bool:
    """Whether ``overload`` is neither PyTorch's nor ours."""
    return overload.namespace not in _OURS


def kernel_from_outside(overload: OpOverload) -> Callable[..., Any] | None:
    """The kernel that others registered for ``xla``, or for every device (``CompositeExplicitAutograd``), or None.

    The latter is where ``torch.library.custom_op`` without ``device_types`` registers its function.
    """
    if not is_from_outside(overload):
        return None
    key = next(filter(overload.has_kernel_for_dispatch_key, _TAKEN), None)
    return None if key is None else functools.partial(overload._op_dk, key)  # torch 2.13


def is_for_every_device(overload: OpOverload) -> bool:
    """Whether the kernel of ``overload`` was registered without ``xla`` in mind."""
    return not overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.XLA)  # torch 2.13


def load_quantized_operators() -> None:
    """Load PyTorch's operators ``quantized_decomposed``, which its own quantizer defines where it is imported."""
    importlib.import_module("torch.ao.quantization.fx._decomposed")  # torch 2.9 to 2.15


MARK: Final = "xla.mark_tensor.default"
"""The name of the operator that marks where composites begin and end."""
