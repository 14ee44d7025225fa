"""``mark_sharding`` and related functions, by which the user says how a tensor is split."""

from __future__ import annotations

from typing import Final

import torch
from torch.autograd.function import FunctionCtx

from xla_core.contract.foreign_values import ForeignObject
from xla_core.extension_api import runtime
from xla_core.extension_api.operators import Gradients, Operand, handler_of
from xla_core.extension_api.steps import Trace
from xla_core.extension_api.tensors import XLATensor, storage_of, view_of
from xla_core.support import counters
from xla_spmd.lowering import gradient_sharding
from xla_spmd.lowering.annotation_ops import ANNOTATE
from xla_spmd.lowering.dynamo import mark_in_graph
from xla_spmd.lowering.mesh_backend import MeshBackend
from xla_spmd.sharding.annotation import Annotation, checked_annotation, checked_sharding
from xla_spmd.sharding.hlo_sharding import REPLICATED, Sharding
from xla_spmd.sharding.mesh import Mesh
from xla_spmd.sharding.partition_spec import Spec
from xla_spmd.tensors.sharded_tensor import (
    XLAShardedTensor,
    unwrap_sharded_tensor,
    wrap_as_sharded_tensor,
)

MSG_NOT_XLA: Final = (
    "Expected XLA tensor. Got: {kind}. Only a tensor on the devices can be split over them: call "
    "t = t.to('xla') first"
)
MSG_NOT_SPMD: Final = (
    "the devices of this process are used separately; call torch_xla.runtime.use_spmd() at the start of the "
    "script to use them as one, over which tensors can be split"
)


def mark_sharding(
    t: torch.Tensor,
    mesh: Mesh,
    partition_spec: Spec,
    use_dynamo_custom_op: bool = False,
) -> XLAShardedTensor:
    """Split ``t`` over the devices of ``mesh``, in place. XLA propagates the sharding to what is computed from it.

    ``partition_spec`` has one entry per dimension of ``t``: the mesh axis (name or number) over which the dimension
    is split, a tuple of axes, or None for a dimension that is not split. If ``t`` has a value, it is moved at once;
    if it is pending, the program that computes it splits it. A second call replaces the first.

    With ``use_dynamo_custom_op`` (default: False), the call is an operator of the graph inside ``torch.compile``,
    and only the returned tensor is split. Otherwise returns ``t`` as an ``XLAShardedTensor``, which shares its
    value and its gradient history.

    Raises RuntimeError outside SPMD mode, ValueError if ``t`` is not on an ``xla`` device or ``mesh`` does not have
    each device of the job once, and PartitionSpecError if ``partition_spec`` does not fit ``mesh`` or ``t``.
    """
    if use_dynamo_custom_op and torch.compiler.is_compiling():
        return mark_in_graph(t, mesh, partition_spec)  # type: ignore[return-value]
    tensor = unwrap_sharded_tensor(t)
    annotate(tensor, mesh, partition_spec)
    return wrap_as_sharded_tensor(tensor, mesh, partition_spec)


def annotate(tensor: torch.Tensor, mesh: Mesh, partition_spec: Spec) -> Annotation:
    """Do what ``mark_sharding`` does, but return the annotation instead of a wrapped tensor."""
    checked(tensor)
    counters.increment("XlaMarkSharding")
    return apply_annotation(tensor, checked_annotation(mesh, partition_spec, tuple(tensor.shape)))


def apply_annotation(tensor: torch.Tensor, annotation: Annotation) -> Annotation:
    """Split ``tensor``, and later its gradient, as ``annotation`` says, in place. Raises as ``checked`` does."""
    set_annotation(checked(tensor), annotation)
    gradient_sharding.watch(tensor)
    return annotation


def annotate_value(tensor: torch.Tensor, sharding: Sharding) -> None:
    """Split only the current value of ``tensor``, in the program that uses it next."""
    xla = checked(tensor)
    with storage_of(xla).trace.lock:
        _annotate_in_program(xla, sharding)


def checked(tensor: torch.Tensor) -> XLATensor:
    """``tensor``, if it can be split. Raises ValueError if it is on the CPU, RuntimeError outside SPMD mode."""
    if not isinstance(tensor, XLATensor):
        raise NotOnDeviceError(MSG_NOT_XLA.format(kind=torch.Tensor.type(tensor)))
    mesh_backend(storage_of(tensor).trace)
    return tensor


class NotOnDeviceError(ValueError, RuntimeError):
    """A tensor is not on an ``xla`` device; torch_xla raises a RuntimeError for it."""


def mesh_backend(trace: Trace) -> MeshBackend:
    """The backend of ``trace``, which is that of all devices. Raises RuntimeError outside SPMD mode."""
    backend = trace.backend
    if not isinstance(backend, MeshBackend):
        raise RuntimeError(MSG_NOT_SPMD)
    return backend


def set_annotation(tensor: XLATensor, annotation: Annotation | None) -> None:
    """Split ``tensor`` as ``annotation`` says from now on, in place; with None every device holds it whole.

    A view is split only for its current value, since its storage has another shape.
    """
    storage = storage_of(tensor)
    trace = storage.trace
    text = None
    if annotation is not None:
        text = annotation.text
        counters.increment("SetShardingSpec")
    with trace.lock:
        if view_of(tensor) is None and storage.epoch != trace.epoch and trace.backend.shapes_only:
            # ahead of time a buffer is only a shape: replace it, there is no value to move
            storage.relocate(mesh_backend(trace).allocate(storage.meta, text))
        elif view_of(tensor) is not None or storage.buffer is None or storage.epoch == trace.epoch:
            sharding = annotation.sharding if annotation is not None else REPLICATED
            _annotate_in_program(tensor, sharding)
        else:
            storage.relocate(mesh_backend(trace).resharded(storage.buffer, text))
        if view_of(tensor) is None:
            storage.annotate(annotation)


def _annotate_in_program(tensor: XLATensor, sharding: Sharding) -> None:
    """Record an annotation of the tensor's value, and let the tensor show its result, unseen by autograd."""
    annotated = handler_of(ANNOTATE)((tensor, sharding.text), None)
    view, storage = view_of(tensor), storage_of(tensor)
    trace = storage.trace
    if view is None:
        trace.assign(storage, storage_of(annotated).vid)
    else:
        # annotate the value of this view only: the storage and its other views have other shapes
        view.show(storage_of(annotated).vid, trace.epoch, storage.version)


def annotate_custom_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: Spec) -> XLAShardedTensor:
    """Split only the current value of ``t``, in the program that uses it next.

    ``mesh`` and ``partition_spec`` are those of ``mark_sharding``. Unlike there, the compiler chooses how values
    are split that are written to ``t`` later. Returns ``t`` as an ``XLAShardedTensor``. Raises what
    ``mark_sharding`` raises.
    """
    tensor = checked(unwrap_sharded_tensor(t))
    annotate_value(tensor, checked_sharding(mesh, partition_spec, tuple(tensor.shape)))
    return wrap_as_sharded_tensor(tensor, mesh, partition_spec)


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Undo ``mark_sharding``: every device holds the whole of ``t`` again.

    Returns the tensor itself, without the wrapper. Raises RuntimeError outside SPMD mode, and ValueError if ``t``
    is not on an ``xla`` device.
    """
    tensor = unwrap_sharded_tensor(t)
    set_annotation(checked(tensor), None)
    return tensor


def is_sharded(t: torch.Tensor) -> bool:
    """Whether ``t`` has an annotation."""
    tensor = unwrap_sharded_tensor(t)
    return (
        isinstance(tensor, XLATensor)
        and runtime.is_spmd()
        and getattr(storage_of(tensor), "annotation", None) is not None
    )


def wrap_if_sharded(x: Operand) -> Operand:
    """``x`` as an ``XLAShardedTensor`` if it is an annotated tensor; anything else is returned as it is."""
    if isinstance(x, torch.Tensor) and not isinstance(x, XLAShardedTensor) and is_sharded(x):
        annotation: ForeignObject = storage_of(x).annotation  # type: ignore[attr-defined]
        return wrap_as_sharded_tensor(x, annotation.mesh, annotation.spec)
    return x


class MarkShardingFunction(torch.autograd.Function):
    """Annotates a value and its gradient: ``apply(tensor, mesh, partition_spec)``."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, tensor: torch.Tensor, mesh: Mesh, partition_spec: Spec
    ) -> torch.Tensor:
        """A split tensor with the value of ``tensor``, which is not changed."""
        ctx.mesh, ctx.spec = mesh, partition_spec
        return _annotated(tensor, mesh, partition_spec)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Gradients:
        """The gradient, split in the same way."""
        return _annotated(gradients[0], ctx.mesh, ctx.spec), None, None


def _annotated(tensor: torch.Tensor, mesh: Mesh, spec: Spec) -> torch.Tensor:
    if not isinstance(tensor, XLATensor) and tensor.device.type == "xla":
        # a tensor of AOTAutograd's tracing: the operator goes into the graph
        sharding = checked_sharding(mesh, spec, tuple(tensor.shape))
        return ANNOTATE(tensor, sharding.text)  # type: ignore[no-any-return]
    xla = checked(tensor)
    annotation = checked_annotation(mesh, spec, tuple(tensor.shape))
    annotated: XLATensor = handler_of(ANNOTATE)((xla, annotation.sharding.text), None)
    storage_of(annotated).annotate(annotation)  # its spec is known before the step has run
    return annotated


def mark_sharding_with_gradients(t: torch.Tensor, mesh: Mesh, partition_spec: Spec) -> torch.Tensor:
    """A tensor with the value of ``t`` that is split over ``mesh``, and whose gradient will be split likewise.

    ``partition_spec`` has one entry per dimension of ``t``, as in ``mark_sharding``. Raises what it raises.
    """
    return MarkShardingFunction.apply(unwrap_sharded_tensor(t), mesh, partition_spec)
