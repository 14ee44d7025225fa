"""``Annotation``: the sharding that ``mark_sharding`` stores on a tensor's storage."""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from xla_core.extension_api import runtime
from xla_core.extension_api.backends import Storage
from xla_core.extension_api.tensors import storage_of, view_of
from xla_core.support import caches
from xla_spmd.sharding.hlo_sharding import REPLICATED, Sharding, canonical
from xla_spmd.sharding.mesh import Mesh
from xla_spmd.sharding.partition_spec import Spec, check_rank

MSG_DEVICES: Final = (
    "the mesh {mesh} is over {size} devices, this job has {count}: a mesh names each device of the "
    "job once, 0 to {last}. Use np.arange(xr.global_runtime_device_count()). For copies on several "
    "devices, add an axis over which no dimension is split"
)


class MeshDevicesError(ValueError, AssertionError):
    """A mesh whose devices are not those of the job; torch_xla raises an AssertionError for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Annotation:
    """The sharding that the user gave a tensor, and the mesh and partition spec that describe it.

    ``text`` is the canonical HLO sharding, or None if every device holds the whole value.
    """

    sharding: Sharding
    text: str | None
    mesh: Mesh
    spec: Spec


def annotation_of(tensor: torch.Tensor) -> Annotation | None:
    """The annotation of a tensor, or None. A view of another tensor has none."""
    return None if view_of(tensor) is not None else storage_annotation(storage_of(tensor))


def storage_annotation(storage: Storage) -> Annotation | None:
    """The annotation of a storage; None if it was never annotated, or its annotation was cleared."""
    return getattr(storage, "annotation", None)


def is_unannotated(storage: Storage) -> bool:
    """Whether the storage's annotation was set to None: it was cleared, or its value was placed without one."""
    return getattr(storage, "annotation", storage) is None


def checked_annotation(mesh: Mesh, spec: Spec, shape: tuple[int, ...]) -> Annotation:
    """The annotation that splits a tensor of ``shape`` by ``spec`` over ``mesh``.

    Raises what ``mark_sharding`` raises for the mesh and the spec.
    """
    sharding = checked_sharding(mesh, spec, shape)
    if 0 in shape:  # XLA replicates a value without elements, whatever sharding a program asks for
        sharding = REPLICATED
    return Annotation(sharding, canonical(sharding.text), mesh, tuple(spec))


def checked_sharding(mesh: Mesh, spec: Spec, shape: tuple[int, ...]) -> Sharding:
    """The sharding of a tensor of ``shape`` that is split by ``spec`` over ``mesh``.

    Raises MeshDevicesError if the mesh does not have each device of the job once, and PartitionSpecError if the
    spec does not fit the mesh or the shape.
    """
    return _sharding(mesh, _frozen(spec), shape)


def _frozen(spec: Spec) -> Spec:
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in spec)


@caches.memoized("shardings of annotations")
def _sharding(mesh: Mesh, spec: Spec, shape: tuple[int, ...]) -> Sharding:
    count = len(runtime.client().devices())
    if sorted(mesh.device_ids.tolist()) != list(range(count)):
        text = MSG_DEVICES.format(mesh=mesh, size=mesh.size(), count=count, last=count - 1)
        raise MeshDevicesError(text)
    check_rank(spec, shape)
    return mesh.get_op_sharding(spec)
