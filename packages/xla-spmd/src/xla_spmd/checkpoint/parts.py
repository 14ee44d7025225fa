"""The parts of tensors, as ``torch.distributed.checkpoint`` writes and reads them one by one.

The library gets the parts of an object through three methods (``torch.distributed._checkpointable``).
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
    """The methods of a tensor's stand-in that the planners call."""

    def size(self) -> torch.Size:
        """The whole tensor's shape."""
        ...

    def part(self, index: MetadataIndex) -> torch.Tensor:
        """The part at ``index.offset``, on the CPU."""
        ...


def chunk(indices: tuple[slice, ...] | EllipsisType, shape: torch.Size) -> ChunkStorageMetadata:
    """Offsets and sizes of the part at ``indices`` of a tensor of ``shape``; an Ellipsis means the whole tensor."""
    if isinstance(indices, EllipsisType):
        return ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    return ChunkStorageMetadata(
        torch.Size(s.start for s in indices), torch.Size(s.stop - s.start for s in indices)
    )


def _has_elements(part: ChunkStorageMetadata, shape: torch.Size) -> bool:
    """Whether a part is written and read: behind the end of an uneven dimension, parts are empty and are not."""
    return part.sizes.numel() > 0 or shape.numel() == 0


class _Written:
    """The parts of a tensor that this process writes, with the shape and dtype of the whole tensor."""

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
    """Parts that are copied from the devices when they are written."""

    def __init__(self, tensor: XLATensor) -> None:
        self._backend, self._buffer = placed(tensor)
        shape = torch.Size(tensor.shape)
        shards = shard_indices(tensor)
        # of the devices of the job that hold the same part, the first one's is written
        own = [(chunk(indices, shape), number) for number, indices, copy in shards if not copy]
        own = [(c, number) for c, number in own if _has_elements(c, shape)]
        super().__init__(tensor, [c for c, _ in own])
        self._devices = {tuple(c.offsets): self._backend.devices[number] for c, number in own}
        self._dtype = tensor.dtype

    def part(self, index: MetadataIndex) -> torch.Tensor:
        """The part at ``index.offset``, copied from its device, without padding."""
        client = self._backend.client
        parts = dict(client.shards(self._buffer))
        array = client.get(parts[self._devices[_offsets(index)]])
        (size,) = (c.sizes for c in self.chunks if tuple(c.offsets) == _offsets(index))
        if array.shape != tuple(size):
            array = array[tuple(map(slice, size))].copy()
        return tensors.from_numpy(array, self._dtype)

    def copied(self) -> HostParts:
        """The same parts, copied to the host now."""
        return HostParts(self)


class HostParts(_Written):
    """Parts that were copied to the host already, so that later changes of the tensor do not affect them."""

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
    """This replica's part of a parameter that is cut along dimension 0 into equal parts, padded with zeros.

    ``tensor`` is the part, ``whole`` the shape of the whole parameter, and ``start`` the number of the part's first
    row in it.
    """

    tensor: torch.Tensor
    whole: torch.Size
    start: int

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Offsets and sizes of the part in the whole parameter, without the padding."""
        first = min(self.start, self.whole[0])
        count = min(self.tensor.shape[0], self.whole[0] - first)
        rest = self.whole[1:]
        return ChunkStorageMetadata(
            torch.Size([first, *[0] * len(rest)]), torch.Size([count, *rest])
        )


class RowsToWrite(_Written):
    """A replica's part of a parameter, copied to the host when it is written, or before by ``copied``."""

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
        """The same part, copied to the host now."""
        rows = copy.copy(self)
        rows._value = (
            self._value.cpu() if isinstance(self._value, XLATensor) else self._value.clone()
        )
        return rows


class RowsToLoad:
    """Host memory into which a replica's part of a parameter is read; once complete, it is copied to the parameter.

    The saved parts may be cut otherwise.
    """

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
        """The memory for the part, without the padding."""
        return self._value[: self._chunk.sizes[0]]

    def arrived(self, elements: int) -> None:
        """Count ``elements`` more elements as read; after the last ones, set the parameter's value."""
        self._missing -= elements
        if not self._missing:
            with torch.no_grad():
                self._rows.tensor.copy_(self._value)


class LoadedParts:
    """Host memory for this process's parts of a tensor; once complete, they are sent to the devices."""

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
        """The memory for the part at ``index.offset``."""
        return self._parts[_offsets(index)]

    def arrived(self, elements: int) -> None:
        """Count ``elements`` more elements as read; after the last ones, set the tensor's value."""
        self._missing -= elements
        if self._missing:
            return
        load_local_shards_(
            self._tensor,
            [XLAShard(self._parts[tuple(c.offsets)], ..., "", 0) for c in self._chunks],
        )


class LoadedCopy:
    """Host memory for the value of a tensor on one device, or of a view; once complete, it is copied there."""

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
        """The memory for the whole tensor."""
        return self._value

    def arrived(self, elements: int) -> None:
        """Count ``elements`` more elements as read; after the last ones, set the tensor's value."""
        self._missing -= elements
        if not self._missing:
            with torch.no_grad():
                self._tensor.copy_(self._value)


def _offsets(index: MetadataIndex) -> Offsets:
    return tuple(index.offset or ())


def is_over_mesh(value: object) -> bool:
    """Whether a value is an ``xla`` tensor in SPMD mode, which is on all devices of the job."""
    return isinstance(value, XLATensor) and isinstance(storage_of(value).trace.backend, MeshBackend)


def to_write(value: StateValue) -> StateValue:
    """The object that is written in place of ``value``: a tensor's parts, or the value on the CPU."""
    if is_over_mesh(value):
        return DeviceParts(value)
    if isinstance(value, Rows):
        return RowsToWrite(value)
    return value.detach().cpu() if isinstance(value, XLATensor) else value


def to_load(value: object) -> StateValue:
    """The object into which is read in place of ``value``: memory for a tensor's parts, or the value itself."""
    if isinstance(value, Rows):
        return RowsToLoad(value)
    if not isinstance(value, XLATensor):
        return value
    if is_over_mesh(value) and view_of(value) is None:
        return LoadedParts(value)
    return LoadedCopy(value)
