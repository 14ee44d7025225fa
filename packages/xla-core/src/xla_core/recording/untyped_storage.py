"""``tensor.untyped_storage()`` of an ``xla`` tensor: an identity and a size, no memory.

Libraries (safetensors, accelerate, peft) ask for it to find tensors that share memory. The numbers are
made up so that what they compute with them is right: equal for aliases, different for others, and
a view lies inside its storage at its offset. They are too large for a pointer, so that nothing takes them for
one.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch

from xla_core.recording.geometry import geometry
from xla_core.recording.storage import Storage, View

# id() of a storage is unique while it lives; each gets room for 2**48 bytes.
_ROOM: Final = 48

# Storages of PyTorch's own, without bytes, that live as long as those of ours that they stand for.
_stand_ins: Final[weakref.WeakKeyDictionary[Storage, torch.UntypedStorage]] = (
    weakref.WeakKeyDictionary()
)

MSG_NO_MEMORY: Final = (
    "the storage of a tensor on {device} has no memory that can be {what}; "
    "use the tensor's .cpu() or .copy_()"
)


class StorageHandle:
    """What an ``xla`` tensor's storage tells about itself."""

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
        """A number that this storage's tensors have in common, and no others do while it lives."""
        return id(self._storage) << _ROOM

    def nbytes(self) -> int:
        """The size in bytes of a dense tensor of the storage's shape and PyTorch dtype."""
        return self._storage.meta.nbytes

    def size(self) -> int:
        """As ``nbytes``."""
        return self.nbytes()

    __len__ = size

    def _weak_ref(self) -> int:
        """For torch.multiprocessing's StorageWeakRef, by which torch 2.11 tells arguments that share memory."""
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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(torch.UntypedStorage, name):
            raise AttributeError(name)
        raise RuntimeError(
            MSG_NO_MEMORY.format(device=self._storage.trace.device, what=f"used for {name}()")
        )


def address(s: Storage, v: View | None) -> int:
    """The made-up address of the first element of what ``v`` shows of a storage."""
    base = id(s) << _ROOM
    if v is None:
        return base
    try:
        place = geometry(s, v)
    except RuntimeError:  # parts of a conjugate
        return base
    # of what the CPU copies, the address is as good as any
    return base if place.skipped else base + place.offset * v.meta.dtype.itemsize


def is_dense(s: Storage, v: View) -> bool:
    """Whether ``v`` shows elements that follow each other in a contiguous storage, in their order."""
    try:
        place = geometry(s, v)
    except RuntimeError:  # parts of a conjugate
        return False
    if place.skipped:
        return False
    shown = torch.empty_strided(v.meta.shape, place.stride, dtype=v.meta.dtype, device="meta")
    return shown.is_contiguous()
