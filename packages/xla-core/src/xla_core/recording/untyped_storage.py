"""``tensor.untyped_storage()`` of an ``xla`` tensor: an identity and a size, but no memory.

Libraries (safetensors, accelerate, peft) use it to find tensors that share memory. The artificial addresses
give them right answers: they are equal for aliases and different for other tensors, and
a view lies inside its storage at its offset. They are too large for a pointer, so they cannot be mistaken for one.
"""

from __future__ import annotations

import weakref
from typing import Final

import torch

from xla_core.contract.foreign_values import Attribute
from xla_core.recording.geometry import geometry
from xla_core.recording.storage import Storage, View

# id() of a storage is unique while it lives; each gets room for 2**48 bytes.
_ROOM: Final = 48

# PyTorch storages without bytes, which represent our storages and live as long as these.
_stand_ins: Final[weakref.WeakKeyDictionary[Storage, torch.UntypedStorage]] = (
    weakref.WeakKeyDictionary()
)

MSG_NO_MEMORY: Final = (
    "the storage of a tensor on {device} has no memory that can be {what}; "
    "use the tensor's .cpu() or .copy_()"
)


class StorageHandle:
    """The identity and size of an ``xla`` tensor's storage, for libraries that ask."""

    __slots__ = ("__weakref__", "_storage")

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @property
    def device(self) -> torch.device:
        """The ``xla`` device."""
        return self._storage.trace.device

    @property
    def _cdata(self) -> int:
        return id(self._storage)

    def data_ptr(self) -> int:
        """An artificial address that only tensors of this storage share, as long as it lives."""
        return id(self._storage) << _ROOM

    def nbytes(self) -> int:
        """The size in bytes of a dense tensor of the storage's shape and PyTorch dtype."""
        return self._storage.meta.nbytes

    def size(self) -> int:
        """The same as ``nbytes``."""
        return self.nbytes()

    __len__ = size

    def _weak_ref(self) -> int:
        """For torch.multiprocessing's StorageWeakRef, with which torch 2.11 finds arguments that share memory."""
        stand_in = _stand_ins.get(self._storage)
        if stand_in is None:
            stand_in = _stand_ins.setdefault(self._storage, torch.UntypedStorage(0))
        return stand_in._weak_ref()  # type: ignore[no-any-return, attr-defined]

    def is_shared(self) -> bool:
        """False: other processes cannot see it."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageHandle) and other._storage is self._storage

    def __hash__(self) -> int:
        return hash(self._cdata)

    def __getattr__(self, name: str) -> Attribute:
        if name.startswith("__") or not hasattr(torch.UntypedStorage, name):
            raise AttributeError(name)
        raise RuntimeError(
            MSG_NO_MEMORY.format(device=self._storage.trace.device, what=f"used for {name}()")
        )


def address(s: Storage, v: View | None) -> int:
    """The artificial address of the first element that ``v`` shows of a storage."""
    base = id(s) << _ROOM
    if v is None:
        return base
    try:
        place = geometry(s, v)
    except RuntimeError:  # parts of a conjugate
        return base
    # a view that the CPU would copy has no address in the storage: any address will do
    return base if place.skipped else base + place.offset * v.meta.dtype.itemsize


def is_dense(s: Storage, v: View) -> bool:
    """Whether ``v`` shows consecutive elements of a contiguous storage, in their order."""
    try:
        place = geometry(s, v)
    except RuntimeError:  # parts of a conjugate
        return False
    if place.skipped:
        return False
    shown = torch.empty_strided(v.meta.shape, place.stride, dtype=v.meta.dtype, device="meta")
    return shown.is_contiguous()
