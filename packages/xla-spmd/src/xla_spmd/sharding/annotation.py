"""What ``mark_sharding`` leaves on a tensor's storage."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from xla_core.extension_api import runtime
from xla_core.extension_api.backends import Storage
from xla_core.extension_api.tensors import storage_of, view_of
from xla_core.support import caches
from xla_spmd.sharding.hlo_sharding import REPLICATED, Sharding, canonical
from xla_spmd.sharding.mesh import Mesh
from xla_spmd.sharding.partition_spec import Spec, check_rank

MSG_DEVICES: Final = (
    "the mesh {mesh} is over {size} devices, this job has {count}: a mesh names each device of the "
    "job once, 0 to {last}. Use np.arange(xr.global_runtime_device_count()), and an axis that no "
    "dimension is split over for devices that should hold copies"
)


class MeshDevicesError(ValueError, AssertionError):
    """A mesh over other devices than the job's; torch_xla raises an AssertionError."""


@dataclasses.dataclass(frozen=True, slots=True)
class Annotation:
    """How the user wants a tensor split, and the mesh and partition spec that said so.

    ``text`` is the canonical HLO sharding: None where the value is whole on every device.
    """

    sharding: Sharding
    text: str | None
    mesh: Any
    spec: Spec


def annotation_of(tensor: Any) -> Annotation | None:
    """The annotation of a tensor that shows a whole storage, or None."""
    return None if view_of(tensor) is not None else storage_annotation(storage_of(tensor))


def storage_annotation(storage: Storage) -> Annotation | None:
    """The annotation of a storage, or None (also one that was cleared, or never asked for)."""
    return getattr(storage, "annotation", None)


def is_unannotated(storage: Storage) -> bool:
    """Whether the user gave a value no sharding, or cleared it."""
    return getattr(storage, "annotation", storage) is None


def checked_annotation(mesh: Mesh, spec: Spec, shape: tuple[int, ...]) -> Annotation:
    """The annotation of a tensor of ``shape``. Raises what ``mark_sharding`` raises."""
    sharding = checked_sharding(mesh, spec, shape)
    if 0 in shape:  # XLA lays a value without elements out whole, whatever a program says
        sharding = REPLICATED
    return Annotation(sharding, canonical(sharding.text), mesh, tuple(spec))


def checked_sharding(mesh: Mesh, spec: Spec, shape: tuple[int, ...]) -> Sharding:
    """The sharding of a tensor of ``shape`` on ``mesh``. Raises what ``mark_sharding`` raises."""
    return _sharding(mesh, _frozen(spec), shape)


def _frozen(spec: Spec) -> tuple[Any, ...]:
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in spec)


@caches.memoized("shardings of annotations")
def _sharding(mesh: Mesh, spec: Spec, shape: tuple[int, ...]) -> Sharding:
    count = len(runtime.client().devices())
    if sorted(mesh.device_ids.tolist()) != list(range(count)):
        text = MSG_DEVICES.format(mesh=mesh, size=mesh.size(), count=count, last=count - 1)
        raise MeshDevicesError(text)
    check_rank(spec, shape)
    return mesh.get_op_sharding(spec)
