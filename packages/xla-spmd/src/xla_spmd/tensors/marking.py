"""``mark_sharding`` and related functions: the user says how a tensor is split."""

from __future__ import annotations

from typing import Final

import torch
from torch.autograd.function import FunctionCtx

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
    "Expected XLA tensor. Got: {kind}. A tensor is split over devices when it is on them: "
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
    """Split ``t`` over the devices of ``mesh``, in place; what is computed from it follows.

    ``partition_spec`` has one entry per dimension: the mesh axis (name or number) it lies on, a tuple
    of axes, or None for a dimension that every device holds whole. A tensor that has a value is
    moved at once; one that is still to be computed will come so. A second call replaces
    the first. With ``use_dynamo_custom_op`` it is, inside ``torch.compile``, an operator of the graph: go
    on with the tensor it returns.

    Returns ``t`` as an ``XLAShardedTensor``, which shares its value and its gradient history.

    Raises RuntimeError outside SPMD mode, ValueError for a tensor that is not on an ``xla`` device or a mesh
    over other devices than the job's, and PartitionSpecError for a spec that fits neither.
    """
    if use_dynamo_custom_op and torch.compiler.is_compiling():
        return mark_in_graph(t, mesh, partition_spec)  # type: ignore[return-value]
    tensor = unwrap_sharded_tensor(t)
    annotate(tensor, mesh, partition_spec)
    return wrap_as_sharded_tensor(tensor, mesh, partition_spec)


def annotate(tensor: torch.Tensor, mesh: Mesh, partition_spec: Spec) -> Annotation:
    """``mark_sharding`` without the wrapper around its result."""
    checked(tensor)
    counters.increment("XlaMarkSharding")
    return lay_as(tensor, checked_annotation(mesh, partition_spec, tuple(tensor.shape)))


def lay_as(tensor: torch.Tensor, annotation: Annotation) -> Annotation:
    """Split a tensor as an annotation says, in place, and its gradient with it. Raises as ``checked``."""
    lay(checked(tensor), annotation)
    gradient_sharding.watch(tensor)
    return annotation


def lay_value(tensor: torch.Tensor, sharding: Sharding) -> None:
    """Let the current value of a tensor be split in the program that uses it next, and nothing else."""
    xla = checked(tensor)
    with storage_of(xla).trace.lock:
        _lay_pending(xla, sharding)


def checked(tensor: torch.Tensor) -> XLATensor:
    """``tensor``, if it can be split. Raises ValueError for one on the CPU, RuntimeError outside SPMD."""
    if not isinstance(tensor, XLATensor):
        raise NotOnDeviceError(MSG_NOT_XLA.format(kind=torch.Tensor.type(tensor)))
    mesh_backend(storage_of(tensor).trace)
    return tensor


class NotOnDeviceError(ValueError, RuntimeError):
    """A tensor that is not on an ``xla`` device; torch_xla raises a RuntimeError."""


def mesh_backend(trace: Trace) -> MeshBackend:
    """The devices behind a trace. Raises RuntimeError outside SPMD mode."""
    backend = trace.backend
    if not isinstance(backend, MeshBackend):
        raise RuntimeError(MSG_NOT_SPMD)
    return backend


def lay(tensor: XLATensor, annotation: Annotation | None) -> None:
    """Split ``tensor`` as ``annotation`` says from now on; None: every device has the whole of it."""
    storage = storage_of(tensor)
    trace = storage.trace
    text = None
    if annotation is not None:
        text = annotation.text
        counters.increment("SetShardingSpec")
    with trace.lock:
        if view_of(tensor) is None and storage.epoch != trace.epoch and trace.backend.shapes_only:
            # weights to be loaded, or a value: either way a shape, which nothing has to move
            storage.relocate(mesh_backend(trace).allocate(storage.meta, text))
        elif view_of(tensor) is not None or storage.buffer is None or storage.epoch == trace.epoch:
            sharding = annotation.sharding if annotation is not None else REPLICATED
            _lay_pending(tensor, sharding)
        else:
            storage.relocate(mesh_backend(trace).resharded(storage.buffer, text))
        if view_of(tensor) is None:
            storage.annotate(annotation)


def _lay_pending(tensor: XLATensor, sharding: Sharding) -> None:
    """Record the annotation; the tensor shows the annotated value, autograd does not notice."""
    annotated = handler_of(ANNOTATE)((tensor, sharding.text), None)
    view, storage = view_of(tensor), storage_of(tensor)
    trace = storage.trace
    if view is None:
        trace.assign(storage, storage_of(annotated).vid)
    else:
        # only this look at the storage is annotated: the others see values of other shapes
        view.show(storage_of(annotated).vid, trace.epoch, storage.version)


def annotate_custom_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: Spec) -> XLAShardedTensor:
    """Split the current value of ``t`` in the program that uses it next, and nothing else.

    ``mesh`` and ``partition_spec`` are those of ``mark_sharding``. Unlike after ``mark_sharding``, what is
    written to ``t`` later lies as the compiler chooses. Returns ``t`` as an ``XLAShardedTensor``. Raises what
    ``mark_sharding`` raises.
    """
    tensor = checked(unwrap_sharded_tensor(t))
    lay_value(tensor, checked_sharding(mesh, partition_spec, tuple(tensor.shape)))
    return wrap_as_sharded_tensor(tensor, mesh, partition_spec)


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Take back what ``mark_sharding`` did: ``t`` is whole on every device again.

    Returns the tensor itself, without the wrapper. Raises as ``mark_sharding`` does.
    """
    tensor = unwrap_sharded_tensor(t)
    lay(checked(tensor), None)
    return tensor


def is_sharded(t: torch.Tensor) -> bool:
    """Whether ``t`` was annotated."""
    tensor = unwrap_sharded_tensor(t)
    return (
        isinstance(tensor, XLATensor)
        and runtime.is_spmd()
        and getattr(storage_of(tensor), "annotation", None) is not None
    )


def wrap_if_sharded(x: Operand) -> Operand:
    """``x`` as an ``XLAShardedTensor`` if it is an annotated tensor, else ``x`` itself."""
    if isinstance(x, torch.Tensor) and not isinstance(x, XLAShardedTensor) and is_sharded(x):
        annotation = storage_of(x).annotation  # type: ignore[attr-defined]
        return wrap_as_sharded_tensor(x, annotation.mesh, annotation.spec)
    return x


class MarkShardingFunction(torch.autograd.Function):
    """An annotation of a value and of its gradient: ``apply(tensor, mesh, partition_spec)``."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, tensor: torch.Tensor, mesh: Mesh, partition_spec: Spec
    ) -> torch.Tensor:
        """A value equal to ``tensor``, split; ``tensor`` itself stays as it is."""
        ctx.mesh, ctx.spec = mesh, partition_spec
        return _annotated(tensor, mesh, partition_spec)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Gradients:
        """The gradient, split in the same way."""
        return _annotated(gradients[0], ctx.mesh, ctx.spec), None, None


def _annotated(tensor: torch.Tensor, mesh: Mesh, spec: Spec) -> torch.Tensor:
    if not isinstance(tensor, XLATensor) and tensor.device.type == "xla":
        # one that AOTAutograd traces with: the operator goes into the graph
        sharding = checked_sharding(mesh, spec, tuple(tensor.shape))
        return ANNOTATE(tensor, sharding.text)  # type: ignore[no-any-return]
    xla = checked(tensor)
    sharding = checked_sharding(mesh, spec, tuple(tensor.shape))
    return handler_of(ANNOTATE)((xla, sharding.text), None)


def mark_sharding_with_gradients(t: torch.Tensor, mesh: Mesh, partition_spec: Spec) -> torch.Tensor:
    """A tensor equal to ``t`` that is split over ``mesh``, and whose gradient will be.

    ``partition_spec`` has one entry per dimension of ``t``; see ``mark_sharding``, whose errors it raises.
    """
    return MarkShardingFunction.apply(unwrap_sharded_tensor(t), mesh, partition_spec)
