"""``XLAShardedTensor``: a tensor that knows how it is split, and gives access to its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Final

import torch
from torch.autograd.function import FunctionCtx

from xla_core.contract.device_protocol import ArraySpec, Placement
from xla_core.contract.foreign_values import AnyFunction, ForeignObject
from xla_core.extension_api import runtime, tensors
from xla_core.extension_api.operators import Gradients, Operand, when_dynamo_is_used
from xla_core.extension_api.tensors import XLATensor, alias, materialise, storage_of, view_of
from xla_spmd.lowering import gradient_sharding
from xla_spmd.lowering.mesh_backend import HostValue, MeshBackend
from xla_spmd.lowering.uneven_dims import filled_up
from xla_spmd.sharding.annotation import (
    Annotation,
    checked_annotation,
    is_unannotated,
    storage_annotation,
)
from xla_spmd.sharding.dtensor_placements import (
    checked_partition_spec,
    convert_to_xla_mesh,
    device_mesh_of,
    placements_of,
)
from xla_spmd.sharding.hlo_sharding import Sharding, ShardingType, parse
from xla_spmd.sharding.mesh import Mesh
from xla_spmd.sharding.partition_spec import Spec
from xla_spmd.tensors.resharding import Dtypes, resharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement as TorchPlacement

MSG_NO_PLACEMENTS: Final = (
    "placements is needed for redistribute! Give one for each dimension of the mesh {mesh}: "
    "Shard(dimension), or Replicate() for a dimension whose devices hold copies"
)
MSG_PART_ONLY: Final = (
    "to_local: the devices of this process hold only a part of this tensor of shape {shape}, split "
    "as {text}, and a tensor on {device} belongs to all processes. Read the parts on the CPU with "
    "local_shards, or use the whole value with full_tensor()"
)
MSG_IN_GRAPHS: Final = (
    "redistribute, full_tensor and to_local run between graphs of torch.compile: do not pass fullgraph=True, or "
    "split values inside the function with mark_sharding(..., use_dynamo_custom_op=True)"
)
MSG_SHARD_COUNT: Final = (
    "load_local_shards_ got {got} shards; this process holds {wanted} of this tensor, one per device "
    "it addresses, in the order of local_shards"
)
MSG_SHARD_SHAPE: Final = (
    "load_local_shards_: shard {index} has shape {got} and dtype {dtype}; for a tensor of shape {shape} split "
    "as {text} it must have shape {wanted}, or {own} without padding, and dtype {expected}"
)


@dataclasses.dataclass
class XLAShard:
    """One device's part of a tensor.

    ``data`` is a CPU tensor. It has the same shape for all devices: if the tensor does not divide evenly, the last
    parts are padded with zeros. ``indices`` is the place of the part in the whole tensor: a list of one slice per
    dimension, or an Ellipsis if the device holds the whole tensor. ``shard_device`` is the runtime's name of the
    device (``CPU:3``). ``replica_id`` numbers the devices that hold the same part, from 0.
    """

    data: torch.Tensor
    indices: Sequence[slice] | EllipsisType
    shard_device: str
    replica_id: int

    @property
    def unpadded_data(self) -> torch.Tensor:
        """``data`` without its padding."""
        if isinstance(self.indices, EllipsisType):
            return self.data
        return self.data[tuple(slice(0, s.stop - s.start) for s in self.indices)]


class XLAShardedTensor(XLATensor):
    """An ``xla`` tensor that knows its mesh and partition spec, as ``mark_sharding`` returns it.

    It shares value and gradient history with the tensor it was made of, and behaves like it.
    ``XLAShardedTensor(elem, mesh_shape, partition_spec)`` wraps a tensor without annotating it. A CPU tensor is
    moved to ``xla:0`` first. ``mesh_shape`` is the shape of a mesh over the job's devices in their order (default:
    one axis).
    """

    __slots__ = ("mesh", "partition_spec")
    mesh: Mesh
    partition_spec: Spec

    def __new__(
        cls,
        elem: torch.Tensor,
        mesh_shape: Sequence[int] | None = None,
        partition_spec: Spec | None = None,
        *,
        requires_grad: bool = False,
    ) -> XLAShardedTensor:
        """``elem`` as an ``XLAShardedTensor``."""
        tensor = unwrap_sharded_tensor(elem if isinstance(elem, XLATensor) else elem.to("xla"))
        sharded = wrap_as_sharded_tensor(
            tensor, mesh_shape=mesh_shape, partition_spec=partition_spec or ()
        )
        return sharded.requires_grad_() if requires_grad else sharded

    def __init__(self, *_args: Operand, **_named: object) -> None:
        """Do nothing: ``__new__`` has wrapped the tensor."""

    @property
    def global_tensor(self) -> XLATensor:
        """The same tensor without the wrapper."""
        return unwrap_sharded_tensor(self)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The shape of the mesh over which the tensor is split."""
        return tuple(self.mesh.mesh_shape)

    @property
    def sharding_spec(self) -> str:
        """The HLO sharding, as torch_xla prints it; empty if there is none."""
        return sharding_text(self)

    @property
    def sharding_type(self) -> ShardingType | None:
        """The kind of sharding, or None if there is none (it was cleared)."""
        return sharding_type(self)

    @property
    def local_shards(self) -> list[XLAShard]:
        """The parts that this process's devices hold, copied to the CPU, in device order."""
        return local_shards(self)

    def load_local_shards_(self, shards: Sequence[XLAShard]) -> None:
        """Replace the tensor's value by ``shards``, one for each device of this process, in device order.

        Only their ``data`` is read; it may have the padding of uneven parts, or not. Raises ValueError for a wrong
        number of shards, or for one with a wrong shape or dtype.
        """
        load_local_shards_(self, shards)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"XLAShardedTensor({super().__repr__()})"

    # -- the methods of torch.distributed.tensor.DTensor ---------------------------------------------

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh as torch's ``DeviceMesh("xla", ...)``."""
        return device_mesh_of(self.mesh)

    @property
    def _spec(self) -> Operand:
        """Mesh, placements, shape and dtype as torch's ``DTensorSpec``."""
        from torch.distributed.tensor._dtensor_spec import DTensorSpec
        from torch.distributed.tensor._dtensor_spec import TensorMeta as SpecMeta

        meta = SpecMeta(self.shape, self.stride(), self.dtype)
        return DTensorSpec(self.device_mesh, self.placements, tensor_meta=meta)

    @property
    def placements(self) -> tuple[TorchPlacement, ...]:
        """For each mesh axis, ``Shard(dimension)`` if a dimension is split over it, else ``Replicate()``."""
        return placements_of(self.partition_spec, self.mesh)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[TorchPlacement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> XLAShardedTensor:
        """A new tensor with the same value, split over ``device_mesh`` as ``placements`` say.

        ``device_mesh`` (default: this tensor's) may have another shape or order of the same devices. ``placements``
        has a ``Shard(dimension)`` or ``Replicate()`` for each of its dimensions. The result has the dtype
        ``forward_dtype``. Gradients are moved in ``backward_dtype``, and arrive with the sharding and dtype of this
        tensor. Both dtypes default to that of this tensor. ``async_op`` has no effect, since nothing waits here.

        Raises RuntimeError if ``placements`` is None or has an entry of another kind (NotImplementedError for
        ``Partial``), IndexError for a dimension that the tensor does not have, and ValueError for a wrong number of
        placements or a mesh that does not have each device of the job once. All but the first are also ValueErrors.
        """
        if placements is None:
            raise RuntimeError(MSG_NO_PLACEMENTS.format(mesh=self.mesh))
        mesh = self.mesh if device_mesh is None else convert_to_xla_mesh(device_mesh)
        shape = tuple(self.shape)
        spec = checked_partition_spec(shape, placements, len(mesh.mesh_shape))
        target = checked_annotation(mesh, spec, shape)
        moved = resharded(
            self.global_tensor, target, self._annotation(), Dtypes(forward_dtype, backward_dtype)
        )
        gradient_sharding.watch(moved)
        return wrap_as_sharded_tensor(moved, mesh, spec)

    def full_tensor(
        self, *, grad_placements: Sequence[TorchPlacement] | None = None
    ) -> torch.Tensor:
        """The same value as a plain tensor that every device holds whole.

        ``grad_placements`` are the placements of the result's gradient in the backward pass; by default (None) the
        compiler chooses. Raises what ``redistribute`` raises.
        """
        return self.redistribute(placements=placements_of((), self.mesh))._plain(grad_placements)

    def to_local(self, *, grad_placements: Sequence[TorchPlacement] | None = None) -> torch.Tensor:
        """The part of the tensor that all devices of this process hold together, as a plain tensor.

        torch's ranks are processes, and here a process may have several devices. If they are all devices of the
        job, or if each device holds the whole tensor, the result is the whole value, split like this tensor.
        ``grad_placements`` is as for ``full_tensor``. Raises NotImplementedError if this process holds only a part;
        ``local_shards`` has its parts on the CPU.
        """
        backend = storage_of(self).trace.backend
        assert isinstance(backend, MeshBackend)
        sharding = self._annotation().sharding
        parts = sharding.places()
        local = {backend.devices.index(d.id) for d in backend.client.local_devices()}
        if set(parts.values()) - {part for device, part in parts.items() if device in local}:
            text = MSG_PART_ONLY.format(
                shape=tuple(self.shape), text=sharding.text, device=self.device
            )
            raise NotImplementedError(text)
        return self._plain(grad_placements)

    def _annotation(self) -> Annotation:
        return checked_annotation(self.mesh, self.partition_spec, tuple(self.shape))

    def _plain(self, grad_placements: Sequence[TorchPlacement] | None) -> torch.Tensor:
        """This tensor as a plain one, whose gradient is split as ``grad_placements`` say."""
        plain = self.global_tensor
        if grad_placements is None:
            return plain
        shape = tuple(self.shape)
        spec = checked_partition_spec(shape, grad_placements, len(self.mesh.mesh_shape))
        of_gradient = checked_annotation(self.mesh, spec, shape)
        return resharded(plain, self._annotation(), of_gradient, Dtypes())

    # torch.nn.Parameter(t) calls this, and requires a result of the same class
    def detach(self) -> XLAShardedTensor:
        """The same tensor without gradient history, as an ``XLAShardedTensor``."""
        detached = alias(self, XLAShardedTensor)
        detached.mesh, detached.partition_spec = self.mesh, self.partition_spec
        gradient_sharding.watch(detached)
        return detached

    # copies and pickles are plain tensors, like the results of operators
    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        return unwrap_sharded_tensor(self).__deepcopy__(memo)


def _keep_out_of_graphs() -> None:
    """Make ``torch.compile`` break its graphs at the methods that redistribute tensors."""
    for name in ("redistribute", "full_tensor", "to_local"):
        method: AnyFunction = torch.compiler.disable(
            getattr(XLAShardedTensor, name), reason=MSG_IN_GRAPHS
        )
        setattr(XLAShardedTensor, name, method)


when_dynamo_is_used(_keep_out_of_graphs)


class _Wrap(torch.autograd.Function):
    """The same tensor as an object of another class; gradients pass through."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: XLATensor, kind: type[XLATensor]) -> XLATensor:
        return alias(tensor, kind)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> Gradients:
        return gradients[0], None


def _as(tensor: XLATensor, kind: type[XLATensor]) -> Operand:
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Wrap.apply(tensor, kind)
    return alias(tensor, kind).requires_grad_(tensor.requires_grad)


def wrap_as_sharded_tensor(
    t: torch.Tensor,
    mesh: Mesh | None = None,
    partition_spec: Spec = (),
    *,
    mesh_shape: Sequence[int] | None = None,
) -> XLAShardedTensor:
    """``t`` as an ``XLAShardedTensor`` with this ``mesh`` and ``partition_spec``. Does not annotate it.

    Without ``mesh`` (default: None), it gets a mesh of shape ``mesh_shape`` over the job's devices in their order,
    by default with one axis. Raises AssertionError if ``mesh_shape`` does not have the job's number of devices.
    """
    assert isinstance(t, XLATensor)
    wrapped: XLAShardedTensor = _as(t, XLAShardedTensor)
    if mesh is None:
        count = len(runtime.client().devices())
        mesh = Mesh(range(count), (count,) if mesh_shape is None else mesh_shape)
    wrapped.mesh = mesh
    wrapped.partition_spec = tuple(partition_spec)
    return wrapped


def unwrap_sharded_tensor(t: Operand) -> Operand:
    """The plain tensor inside an ``XLAShardedTensor``; anything else is returned as it is."""
    return _as(t, XLATensor) if isinstance(t, XLAShardedTensor) else t


# -- shardings and parts of tensors --------------------------------------------------------------------


def sharding_of(tensor: torch.Tensor) -> Sharding | None:
    """The sharding of ``tensor``: that of its annotation, else that of its value; None if it has neither.

    A pending tensor has no sharding unless it is annotated.
    """
    if not isinstance(tensor, XLATensor):
        return None
    backend = storage_of(tensor).trace.backend
    storage = storage_of(tensor)
    if not isinstance(backend, MeshBackend) or view_of(tensor) is not None:
        return None
    if is_unannotated(storage):
        return None
    annotation = storage_annotation(storage)
    if annotation is not None:
        return annotation.sharding
    if storage.buffer is None or (type(storage.buffer) is HostValue and not storage.buffer.placed):
        return None
    return parse(backend.sharding_of(storage.buffer))


def sharding_text(tensor: torch.Tensor) -> str:
    """The HLO sharding of ``tensor`` as torch_xla prints it; empty if it has none."""
    sharding = sharding_of(tensor)
    return "" if sharding is None else sharding.text


def sharding_type(tensor: torch.Tensor) -> ShardingType | None:
    """The kind of the sharding of ``tensor``, or None if it has none."""
    sharding = sharding_of(tensor)
    return None if sharding is None else sharding.type


def placed(tensor: XLATensor) -> tuple[MeshBackend, ForeignObject]:
    """The backend and the buffer of a tensor, whose value is computed and placed on the devices if necessary.

    Raises RuntimeError outside SPMD mode.
    """
    whole = tensor if view_of(tensor) is None else tensor.detach().clone()
    storage = storage_of(whole)
    trace = storage.trace
    backend = trace.backend
    if not isinstance(backend, MeshBackend):
        raise RuntimeError(
            f"a tensor on {tensor.device} has no shards: call torch_xla.runtime.use_spmd() first"
        )
    with trace.lock:
        buffer = materialise(trace, storage)
        if buffer is None:
            trace.add_input(storage)
            buffer = materialise(trace, storage)
        if type(buffer) is HostValue:
            buffer = backend.place(buffer)
    return backend, buffer


def shard_indices(tensor: XLATensor) -> list[tuple[int, tuple[slice, ...] | EllipsisType, int]]:
    """For each device of this process: its number in the mesh, the slices of its part, the number of the copy."""
    backend, buffer = placed(tensor)
    sharding = parse(backend.sharding_of(buffer))
    indices = sharding.indices(tensor.shape)
    local = [d.id for d in backend.client.local_devices()]
    places = sharding.places()
    last_copy: dict[tuple[int, ...] | None, int] = {}  # by part
    copies = {}  # by device
    for number in range(backend.count):
        part = places.get(number)
        copies[number] = last_copy[part] = last_copy.get(part, -1) + 1
    numbers = [backend.devices.index(i) for i in local]
    return [(n, indices.get(n, Ellipsis), copies[n]) for n in sorted(numbers)]


def listed(indices: tuple[slice, ...] | EllipsisType) -> list[slice] | EllipsisType:
    """The slices of a part in torch_xla's form: a list, with steps of 1."""
    if isinstance(indices, EllipsisType):
        return indices
    return [slice(part.start, part.stop, 1) for part in indices]


def local_shards(tensor: XLATensor) -> list[XLAShard]:
    """The parts of ``tensor`` that this process's devices hold, copied to the CPU."""
    backend, buffer = placed(tensor)
    parts = dict(backend.client.shards(buffer))
    kind = runtime.device_type()
    shards = []
    for number, indices, copy in shard_indices(tensor):
        device = backend.devices[number]
        data = tensors.from_numpy(backend.client.get(parts[device]), tensor.dtype)
        shards.append(XLAShard(data, listed(indices), f"{kind}:{device}", copy))
    return shards


def load_local_shards_(tensor: XLATensor, shards: Sequence[XLAShard]) -> None:
    """Replace the value of ``tensor`` by ``shards``; see ``XLAShardedTensor.load_local_shards_``."""
    backend, buffer = placed(tensor)
    placement = backend.client.placement_of(buffer)
    sharding = parse(placement.sharding)
    part_shape, indices = sharding.shard_shape(tensor.shape), sharding.indices(tensor.shape)
    local = sorted(backend.devices.index(d.id) for d in backend.client.local_devices())
    if len(shards) != len(local):
        raise ValueError(MSG_SHARD_COUNT.format(got=len(shards), wanted=len(local)))
    parts = []
    for i, shard in enumerate(shards):
        part = indices.get(local[i])
        own = part_shape if part is None else tuple(s.stop - s.start for s in part)
        if tuple(shard.data.shape) not in (part_shape, own) or shard.data.dtype != tensor.dtype:
            text = MSG_SHARD_SHAPE.format(
                index=i, got=tuple(shard.data.shape), dtype=shard.data.dtype,
                shape=tuple(tensor.shape), text=placement.sharding, wanted=part_shape,
                expected=tensor.dtype, own=own,
            )  # fmt: skip
            raise ValueError(text)
        array = filled_up(tensors.to_numpy(shard.data), part_shape)
        array = array.astype(backend.numpy_dtype(array.dtype))
        parts.append(backend.client.put(array, Placement((backend.devices[local[i]],))))
    spec = ArraySpec(tuple(tensor.shape), buffer.dtype, placement.sharding)
    storage = storage_of(tensor)
    with storage.trace.lock:
        storage.replace(backend.client.assemble(parts, spec, placement))
