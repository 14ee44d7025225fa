"""``ShardingSpec``: the sharding with which data loaders send batches to the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

import torch

from xla_core.contract.device_protocol import ArraySpec, Placement
from xla_core.extension_api import tensors
from xla_core.extension_api.runtime import trace_of
from xla_core.extension_api.steps import tensor_meta
from xla_core.extension_api.tensors import storage_of
from xla_spmd.lowering.mesh_backend import MeshBackend
from xla_spmd.lowering.uneven_dims import filled_up
from xla_spmd.sharding.annotation import Annotation, checked_sharding
from xla_spmd.sharding.hlo_sharding import Sharding, canonical
from xla_spmd.sharding.mesh import Mesh
from xla_spmd.sharding.partition_spec import PartitionSpecError, Spec
from xla_spmd.tensors.marking import annotate, mesh_backend

MSG_MINIBATCH: Final = (
    "minibatch=True: the rows of process {process} are {low} to {high} of the global batch of {rows}, "
    "but the partition spec {spec} puts rows {start} to {stop} on its device {device}. Order the "
    "mesh so that each process's devices follow each other along the axes of dimension 0"
)


@dataclasses.dataclass
class ShardingSpec:
    """The sharding of batches: by ``partition_spec`` over ``mesh``, as in ``mark_sharding``.

    With ``minibatch`` (default: False), each process loads only its own rows: dimension 0 of the global tensor
    concatenates the rows of all processes, in process order.
    """

    mesh: Mesh
    partition_spec: Spec
    minibatch: bool | None = False

    def __post_init__(self) -> None:
        self.partition_spec = tuple(self.partition_spec)

    def can_apply(self, t: torch.Tensor) -> bool:
        """Whether ``t`` has as many dimensions as ``partition_spec`` has entries."""
        return t.dim() == len(self.partition_spec)

    def xla_spec(self, t: torch.Tensor) -> Sharding | None:
        """The sharding of a batch with the dimensions of ``t``, or None if ``can_apply(t)`` is False."""
        return self.mesh.get_op_sharding(self.partition_spec) if self.can_apply(t) else None

    def apply(self, t: torch.Tensor) -> None:
        """Call ``mark_sharding(t, mesh, partition_spec)`` for a tensor on the device."""
        annotate(t, self.mesh, self.partition_spec)

    def send(self, t: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """Send the CPU tensor ``t`` to ``device``, split as the spec says if ``can_apply(t)``.

        With ``minibatch``, raises PartitionSpecError if a device of this process needs rows of other processes.
        """
        if self.minibatch and self.can_apply(t):
            return _from_minibatch(t, device, self)
        sent = t.to(device)
        if self.can_apply(t):
            self.apply(sent)
        return sent


def _from_minibatch(
    t: torch.Tensor, device: torch.device | str, spec: ShardingSpec
) -> torch.Tensor:
    """The global batch, of which this process has the rows ``t``, assembled from the parts of all processes."""
    trace = trace_of(device)
    backend = mesh_backend(trace)
    processes = sorted({d.process_index for d in backend.client.devices()})
    mine = processes.index(backend.client.local_devices()[0].process_index)
    shape = (t.shape[0] * len(processes), *t.shape[1:])
    sharding = checked_sharding(spec.mesh, spec.partition_spec, shape)
    array = tensors.to_numpy(t)
    array = array.astype(backend.numpy_dtype(array.dtype), copy=False)
    part = sharding.shard_shape(shape)
    parts = []
    for number, device, indices in _local_parts(backend, sharding, shape):
        own = array[_local(indices, mine, t.shape[0], spec, number)]
        parts.append(backend.client.put(filled_up(own, part), Placement((device,))))
    text = canonical(sharding.text)
    array_spec = ArraySpec(shape, array.dtype, text)
    buffer = backend.client.assemble(parts, array_spec, Placement(backend.devices, text))
    tensor = trace.from_buffer(buffer, tensor_meta(shape, t.dtype))
    storage_of(tensor).annotate(Annotation(sharding, text, spec.mesh, spec.partition_spec))
    return tensor


def _local_parts(
    backend: MeshBackend, sharding: Sharding, shape: tuple[int, ...]
) -> Iterator[tuple[int, int, tuple[slice, ...]]]:
    """For each device of this process, in order: its number in the mesh, its id, and the slices of its part."""
    local = {d.id for d in backend.client.local_devices()}
    whole = tuple(slice(0, n) for n in shape)
    indices = sharding.indices(shape)
    for number, device in enumerate(backend.devices):
        if device in local:
            yield number, device, indices.get(number, whole)


def _local(
    indices: tuple[slice, ...], process: int, rows: int, spec: ShardingSpec, device: int
) -> tuple[slice, ...]:
    """Convert ``indices`` into the global batch to indices into the ``rows`` rows that this process loaded."""
    low, high = process * rows, (process + 1) * rows
    first, *rest = indices
    if first.start == first.stop:  # an empty part, behind the last row
        return (slice(0, 0), *rest)
    if not low <= first.start <= first.stop <= high:
        text = MSG_MINIBATCH.format(
            process=process, low=low, high=high, rows=rows, spec=spec.partition_spec,
            start=first.start, stop=first.stop, device=device,
        )  # fmt: skip
        raise PartitionSpecError(text)
    return (slice(first.start - low, first.stop - low), *rest)
