"""A user's own Pallas kernels as operations on ``xla`` tensors.

For a TPU the kernel is compiled. On any other device it is interpreted as plain operations, which give the same
values more slowly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import torch

from xla_core.computations.call_jax import call_jax, constant_of, key_of
from xla_core.dispatch.functional import find_trace
from xla_core.jax_bridge import jax_private, pallas_kernels
from xla_core.operators.target import Target
from xla_core.recording.xla_tensor import XLATensor
from xla_core.support import caches, counters
from xla_core.torch_bridge.dtypes import HALF_COMPLEX, NUMPY_DTYPES
from xla_core.torch_bridge.operands import Tree
from xla_core.torch_features.jax_coexistence import requires_jax

OutputShapes = Callable[..., list[tuple[Sequence[int], torch.dtype]]]

MSG_NO_DTYPE: Final = "Unsupported dtype: {dtype}; a kernel's arrays can be {known}"
MSG_NO_LIST: Final = (
    "output_shape_dtype_fn of {kernel} returned {got}; it must return a list of (shape, dtype)"
)
MSG_OTHER_SHAPES: Final = (
    "the kernel {kernel} returns arrays of shapes {shapes}, but its output_shape_dtype_fn returned "
    "{wanted}"
)
MSG_NO_KERNEL: Final = "{kernel} calls no Pallas kernel when it is lowered for a TPU"
MSG_TPU_ONLY: Final = (
    "a kernel that was compiled for TPUs runs on TPUs only, and this device is {platform}. "
    "make_kernel_from_pallas runs the same kernel on any device"
)
# The target of payloads in a process without a TPU.
_DEFAULT_TPU: Final = Target("tpu", "TPU v5 lite")


@dataclasses.dataclass(frozen=True, slots=True)
class _Traced:
    """A function with Pallas kernels, which are traced as ``target`` needs them."""

    kernel: Callable[..., object]
    target: Target

    def __call__(self, *args: object, **kwargs: object) -> Tree:
        tracing: pallas_kernels.Tracing = pallas_kernels.interpreted
        if self.target.platform == "tpu":
            tracing = pallas_kernels.for_tpu(self.target.kind, self.target.cores)
        return pallas_kernels.call(self.kernel, tracing, *args, **kwargs)


def make_kernel_from_pallas(
    kernel: Callable[..., object], output_shape_dtype_fn: OutputShapes
) -> Callable[..., Tree]:
    """A function on ``xla`` tensors that calls ``kernel``, a function on jax arrays that calls Pallas kernels.

    Arguments that are not tensors are constants of the kernel and must be hashable; ``static_argnums`` and
    ``static_argnames`` are accepted and have no effect. ``output_shape_dtype_fn(*args)`` returns a list with the
    (shape, dtype) of each result. A single result is a tensor, several are a tuple. They have no gradients; wrap
    the function in a ``torch.autograd.Function`` for these. A call raises TypeError for tensors on other devices,
    ValueError for results of other shapes.
    """
    return functools.partial(_call, kernel, output_shape_dtype_fn)


def _call(
    kernel: Callable[..., object],
    output_shape_dtype_fn: OutputShapes,
    *args: object,
    static_argnums: object = None,
    static_argnames: object = None,
    **kwargs: object,
) -> jax.Array:
    promised = output_shape_dtype_fn(*args)
    name = getattr(kernel, "__name__", "kernel")
    if not isinstance(promised, list):
        raise ValueError(MSG_NO_LIST.format(kernel=name, got=promised))
    target = find_trace(args, kwargs).backend.target
    results = jax.tree.leaves(call_jax(_Traced(kernel, target), args, kwargs, name))
    shapes, wanted = [tuple(r.shape) for r in results], [tuple(shape) for shape, _ in promised]
    if shapes != wanted:
        raise ValueError(MSG_OTHER_SHAPES.format(kernel=name, shapes=shapes, wanted=wanted))
    outputs = tuple(r.to(dtype) for r, (_, dtype) in zip(results, promised, strict=True))
    return outputs[0] if len(outputs) == 1 else outputs


_payloads: caches.Bounded[Hashable, str] = caches.Bounded("Pallas kernels", 1024)


def trace_pallas(
    kernel: Callable[..., object],
    *args: object,
    static_argnums: object = None,
    static_argnames: object = None,
    use_cache: bool = False,
    **kwargs: object,
) -> tuple[str, list[torch.Tensor]]:
    """The payload of the first Pallas kernel that ``kernel`` calls, and the tensors among ``args``.

    The payload is the kernel's compiled form, which ``_XLAC._xla_tpu_custom_call`` takes. It is compiled for this
    process's TPU, or for a TPU v5e without one; no chip is needed. With ``use_cache`` (default: False) payloads are
    kept by ``kernel``, shapes, dtypes and the other arguments, which are constants and must be hashable then.
    Raises ValueError if no kernel is called, TypeError for a constant that is not hashable.
    """
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    target = _target_of(tensors)
    shapes = tuple(to_jax_shape_dtype_struct(t) for t in tensors)
    key = _key(kernel, target, shapes, args, kwargs) if use_cache else None
    if use_cache and key in _payloads:
        counters.increment("trace_pallas_cache_hit")
        return _payloads[key], tensors

    def traced(*arrays: jax.Array) -> jax.Array:
        rest = iter(arrays)
        filled = [next(rest) if isinstance(a, torch.Tensor) else a for a in args]
        return _Traced(kernel, target)(*filled, **kwargs)

    module = jax_private.lower_to_module(traced, shapes, (), "tpu", "kernel")
    payload = pallas_kernels.first_payload(module)
    if payload is None:
        raise ValueError(MSG_NO_KERNEL.format(kernel=getattr(kernel, "__name__", kernel)))
    if use_cache:
        _payloads.keep(key, payload)
    return payload, tensors


def _key(
    kernel: object,
    target: Target,
    shapes: Sequence[jax.ShapeDtypeStruct],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> Hashable:
    """The key of a payload. Raises TypeError for a constant that is not hashable."""
    places = tuple(isinstance(a, torch.Tensor) for a in args)
    leaves, structure = jax.tree.flatten(
        ([a for a in args if not isinstance(a, torch.Tensor)], dict(kwargs))
    )
    constants = tuple(key_of(constant_of(kernel, i, leaf)) for i, leaf in enumerate(leaves))
    return kernel, target, tuple(shapes), places, constants, structure


def _target_of(tensors: Sequence[torch.Tensor]) -> Target:
    if any(isinstance(t, XLATensor) for t in tensors):
        own = find_trace(tensors).backend.target
        if own.platform == "tpu":
            return own
    return _DEFAULT_TPU


def tpu_custom_call(
    tensors: Sequence[torch.Tensor],
    payload: str,
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[torch.dtype],
) -> list[torch.Tensor]:
    """Run a payload of ``trace_pallas``; returns its results. Raises RuntimeError on a device that is not a TPU."""
    target = find_trace(tensors).backend.target
    if target.platform != "tpu":
        raise RuntimeError(MSG_TPU_ONLY.format(platform=target.platform))
    results = tuple(
        (tuple(shape), convert_torch_dtype_to_jax(dtype))
        for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
    )
    called = functools.partial(pallas_kernels.call_payload, payload, results)
    return list(call_jax(called, tuple(tensors), None, "tpu_custom_call", (payload, results)))


@requires_jax
def convert_torch_dtype_to_jax(dtype: torch.dtype) -> jax.typing.DTypeLike:
    """Jax's scalar type for a PyTorch dtype. Raises ValueError where XLA has none."""
    numpy_dtype = NUMPY_DTYPES.get(dtype)
    if numpy_dtype is None or dtype is HALF_COMPLEX:
        raise ValueError(MSG_NO_DTYPE.format(dtype=dtype, known=", ".join(map(str, NUMPY_DTYPES))))
    return getattr(jnp, numpy_dtype.name.replace("bool", "bool_"))


def to_jax_shape_dtype_struct(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a tensor as jax describes them. Raises ValueError where XLA has no such dtype."""
    return jax.ShapeDtypeStruct(tuple(tensor.shape), convert_torch_dtype_to_jax(tensor.dtype))
