"""What ``mark_sharding`` leaves on a tensor's storage."""

from __future__ import annotations

import dataclasses
from typing import Any

from xla_core.storage import Storage
from xla_spmd.partition_spec import Spec
from xla_spmd.shardings import Sharding


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
    return None if tensor._v is not None else storage_annotation(tensor._s)


def storage_annotation(storage: Storage) -> Annotation | None:
    """The annotation of a storage, or None (also one that was cleared, or never asked for)."""
    return getattr(storage, "annotation", None)


def is_unannotated(storage: Storage) -> bool:
    """Whether the user's value came without a sharding, or had it cleared."""
    return getattr(storage, "annotation", storage) is None
