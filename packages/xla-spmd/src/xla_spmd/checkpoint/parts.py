"""A tensor's parts as ``torch.distributed.checkpoint`` writes and reads them, one by one.

The library asks an object for its parts by three methods (``torch.distributed._checkpointable``).
A part that several devices hold is written once in the job, and read once per process.
"""

from __future__ import annotations

import copy
import dataclasses
from types import EllipsisType
from typing import Protocol

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from xla_core.extension_api import tensors
from xla_core.extension_api.tensors import XLATensor, storage_of, view_of
from xla_spmd.checkpoint.state_dicts import StateValue
from xla_spmd.lowering.mesh_backend import MeshBackend
from xla_spmd.tensors.sharded_tensor import XLAShard, load_local_shards_, placed, shard_indices

Offsets = tuple[int, ...]


class Parts(Protocol):
    """What the planners ask of a tensor."""

    def size(self) -> torch.Size:
        """The whole tensor's shape."""
        ...

    def part(self, index: MetadataIndex) -> torch.Tensor:
        """The part at ``index.offset``, on the CPU."""
        ...


def chunk(indices: tuple[slice, ...] | EllipsisType, shape: torch.Size) -> ChunkStorageMetadata:
    """Where a part of a tensor of ``shape`` is; an Ellipsis is all of it."""
    if isinstance(indices, EllipsisType):
        return ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    return ChunkStorageMetadata(
        torch.Size(s.start for s in indices), torch.Size(s.stop - s.start for s in indices)
    )


def _has_elements(part: ChunkStorageMetadata, shape: torch.Size) -> bool:
    """Whether a part is to be written and read: devices behind the end of an uneven dimension hold none."""
    return part.sizes.numel() > 0 or shape.numel() == 0


class _Written:
    """Parts to write: of what shape and dtype the tensor is, and which parts this process writes."""

    def __init__(self, tensor: torch.Tensor, chunks: list[ChunkStorageMetadata]) -> None:
        self.shape = torch.Size(tensor.shape)
        self.properties = TensorProperties(dtype=tensor.dtype)
        self.chunks = chunks

    def size(self) -> torch.Size:
        """The whole tensor's shape."""
        return self.shape

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, c.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(c, self.properties, self.shape),
            )
            for c in self.chunks
        ]


class DeviceParts(_Written):
    """Parts that are fetched from the devices when they are written."""

    def __init__(self, tensor: XLATensor) -> None:
        self._backend, self._buffer = placed(tensor)
        shape = torch.Size(tensor.shape)
        shards = shard_indices(tensor)
        # the first of the devices with equal parts, in the whole job, is the one whose part is written
        own = [(chunk(indices, shape), number) for number, indices, copy in shards if not copy]
        own = [(c, number) for c, number in own if _has_elements(c, shape)]
        super().__init__(tensor, [c for c, _ in own])
        self._devices = {tuple(c.offsets): self._backend.devices[number] for c, number in own}
        self._dtype = tensor.dtype

    def part(self, index: MetadataIndex) -> torch.Tensor:
        """The part at ``index.offset``."""
        client = self._backend.client
        parts = dict(client.shards(self._buffer))
        array = client.get(parts[self._devices[_offsets(index)]])
        (size,) = (c.sizes for c in self.chunks if tuple(c.offsets) == _offsets(index))
        if array.shape != tuple(size):
            array = array[tuple(map(slice, size))].copy()
        return tensors.from_numpy(array, self._dtype)

    def copied(self) -> HostParts:
        """The same parts, fetched now."""
        return HostParts(self)


class HostParts(_Written):
    """Parts that were fetched before: what happens to the tensor afterwards does not matter."""

    def __init__(self, parts: DeviceParts) -> None:
        self.shape, self.properties, self.chunks = parts.shape, parts.properties, parts.chunks
        self._copies = {
            tuple(c.offsets): parts.part(MetadataIndex("", c.offsets)) for c in self.chunks
        }

    def part(self, index: MetadataIndex) -> torch.Tensor:
        """The part at ``index.offset``."""
        return self._copies[_offsets(index)]


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """This replica's part of a parameter that is cut along dimension 0, and padded with zeros to equal parts.

    Row ``start`` of a tensor of shape ``whole`` is the first of ``tensor``.
    """

    tensor: torch.Tensor
    whole: torch.Size
    start: int

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where the part is in the whole; the padding is in no part."""
        first = min(self.start, self.whole[0])
        count = min(self.tensor.shape[0], self.whole[0] - first)
        rest = self.whole[1:]
        return ChunkStorageMetadata(
            torch.Size([first, *[0] * len(rest)]), torch.Size([count, *rest])
        )


class RowsToWrite(_Written):
    """A replica's part of a parameter, fetched when it is written, or before (``copied``)."""

    def __init__(self, rows: Rows) -> None:
        self._value: torch.Tensor = rows.tensor.detach()
        chunk = rows.chunk
        super().__init__(rows.tensor, [chunk] if chunk.sizes.numel() else [])
        self.shape = rows.whole
        self._count = chunk.sizes[0]

    def part(self, _index: MetadataIndex) -> torch.Tensor:
        """The part, without padding."""
        return self._value.cpu()[: self._count]

    def copied(self) -> RowsToWrite:
        """The same part, fetched now."""
        rows = copy.copy(self)
        rows._value = (
            self._value.cpu() if isinstance(self._value, XLATensor) else self._value.clone()
        )
        return rows


class RowsToLoad:
    """Memory for a replica's part of a parameter, read from any saved parts; when full, it goes to the device."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._chunk = rows.chunk
        self._value = torch.zeros(rows.tensor.shape, dtype=rows.tensor.dtype)
        self._missing = self._chunk.sizes.numel()

    def size(self) -> torch.Size:
        """The whole tensor's shape."""
        return self._rows.whole

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk] if self._missing else []

    def part(self, _index: MetadataIndex) -> torch.Tensor:
        """The memory of the part."""
        return self._value[: self._chunk.sizes[0]]

    def arrived(self, elements: int) -> None:
        """``elements`` more were read; with the last of them the parameter gets its value."""
        self._missing -= elements
        if not self._missing:
            with torch.no_grad():
                self._rows.tensor.copy_(self._value)


class LoadedParts:
    """Memory on the host for the parts of a tensor that this process holds; full, they go to the devices."""

    def __init__(self, tensor: XLATensor) -> None:
        self._tensor = tensor
        self.shape = torch.Size(tensor.shape)
        self._chunks = [chunk(indices, self.shape) for _, indices, _ in shard_indices(tensor)]
        self._parts = {
            tuple(c.offsets): torch.empty(c.sizes, dtype=tensor.dtype) for c in self._chunks
        }
        self._missing = sum(part.numel() for part in self._parts.values())

    def size(self) -> torch.Size:
        """The whole tensor's shape."""
        return self.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        distinct = {tuple(c.offsets): c for c in self._chunks}.values()
        return [c for c in distinct if _has_elements(c, self.shape)]

    def part(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of the part at ``index.offset``."""
        return self._parts[_offsets(index)]

    def arrived(self, elements: int) -> None:
        """``elements`` more were read; with the last of them the tensor gets its value."""
        self._missing -= elements
        if self._missing:
            return
        load_local_shards_(
            self._tensor,
            [XLAShard(self._parts[tuple(c.offsets)], ..., "", 0) for c in self._chunks],
        )


class LoadedCopy:
    """As ``LoadedParts`` for a tensor that is whole on one device, or a view."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._value = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._missing = self._value.numel()

    def size(self) -> torch.Size:
        """The tensor's shape."""
        return self._value.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk(..., self._value.shape)]

    def part(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of all of it."""
        return self._value

    def arrived(self, elements: int) -> None:
        """``elements`` more were read; with the last of them the tensor gets its value."""
        self._missing -= elements
        if not self._missing:
            with torch.no_grad():
                self._tensor.copy_(self._value)


def _offsets(index: MetadataIndex) -> Offsets:
    return tuple(index.offset or ())


def is_over_mesh(value: object) -> bool:
    """Whether a value is a tensor on all devices of the job at once."""
    return isinstance(value, XLATensor) and isinstance(storage_of(value).trace.backend, MeshBackend)


def to_write(value: StateValue) -> StateValue:
    """What of a state dict is written for ``value``: a tensor's parts, or the value on the CPU."""
    if is_over_mesh(value):
        return DeviceParts(value)
    if isinstance(value, Rows):
        return RowsToWrite(value)
    return value.detach().cpu() if isinstance(value, XLATensor) else value


def to_load(value: object) -> StateValue:
    """What of a state dict is read into for ``value``."""
    if isinstance(value, Rows):
        return RowsToLoad(value)
    if not isinstance(value, XLATensor):
        return value
    if is_over_mesh(value) and view_of(value) is None:
        return LoadedParts(value)
    return LoadedCopy(value)
