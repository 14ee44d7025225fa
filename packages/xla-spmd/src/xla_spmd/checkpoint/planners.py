"""Planners for ``torch.distributed.checkpoint`` whose state dicts hold tensors split over devices.

A checkpoint is in that library's own format: it can be loaded over another mesh, on one device, or on the
CPU by the default planner, and what that wrote can be loaded over a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import StorageMeta

from xla_spmd.checkpoint import parts
from xla_spmd.checkpoint.state_dicts import StateDict, StateValue


class SPMDSavePlanner(DefaultSavePlanner):
    """Writes each part of a split tensor once, fetched from its device when it is its turn.

    ``torch.distributed.checkpoint.save(state_dict, ..., planner=SPMDSavePlanner())``. ``paths`` says where
    the keys of a state dict that is flat already come from.
    """

    state_dict: StateDict

    def __init__(self, paths: Mapping[str, tuple[str | int, ...]] | None = None) -> None:
        super().__init__()
        self._paths = paths

    def set_up_planner(
        self,
        state_dict: StateDict,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten ``state_dict`` and look up where its tensors' parts are."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        if self._paths is not None:
            self.mappings = dict(self._paths)
        self.state_dict = {name: parts.to_write(value) for name, value in self.state_dict.items()}

    def lookup_object(self, index: MetadataIndex) -> StateValue:
        """A part of a tensor, or another value."""
        value = self.state_dict[index.fqn]
        return value.part(index) if isinstance(value, _WRITTEN) else super().lookup_object(index)


class SPMDLoadPlanner(DefaultLoadPlanner):
    """Reads into the tensors of a state dict in place, each process the parts that it holds.

    ``torch.distributed.checkpoint.load(state_dict, ..., planner=SPMDLoadPlanner())``. The tensors are on
    the device and split already; how they were split when they were written does not matter. Optimizers
    have no state before their first step: see ``prime_optimizer``.
    """

    state_dict: StateDict

    def set_up_planner(
        self,
        state_dict: StateDict,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten ``state_dict`` and make room for the parts of its tensors."""
        # torch puts None in the place of what it does not know
        rows = list(_rows_in(state_dict, ()))
        super().set_up_planner(state_dict, metadata, is_coordinator)
        for path, container, value in rows:
            container[path[-1]] = self.state_dict[".".join(map(str, path))] = value
        self.state_dict = {name: parts.to_load(value) for name, value in self.state_dict.items()}

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The memory that a part is read into."""
        value = self.state_dict[index.fqn]
        return value.part(index) if isinstance(value, _LOADED) else super().lookup_tensor(index)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """A part, or some of one, was read; with its last one a tensor gets its value."""
        value = self.state_dict[read_item.dest_index.fqn]
        if isinstance(value, _LOADED):
            value.arrived(math.prod(read_item.lengths))


def _rows_in(
    container: dict[Any, Any], path: tuple[object, ...]
) -> Iterator[tuple[tuple[object, ...], dict[object, object], parts.Rows]]:
    """Replicas' parts of parameters in nested dicts: their paths, and which dict each is in."""
    for key, value in container.items():
        if isinstance(value, parts.Rows):
            yield (*path, key), container, value
        elif isinstance(value, dict):
            yield from _rows_in(value, (*path, key))


_WRITTEN = (parts.DeviceParts, parts.HostParts, parts.RowsToWrite)
_LOADED = (parts.LoadedParts, parts.LoadedCopy, parts.RowsToLoad)
