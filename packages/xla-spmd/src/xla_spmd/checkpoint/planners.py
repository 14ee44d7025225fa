"""Planners for ``torch.distributed.checkpoint`` that save and load tensors which are split over devices.

A checkpoint has that library's own format: it can be loaded over another mesh, on one device, or on the CPU by the
default planner, and checkpoints of the default planner can be loaded over a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import StorageMeta

from xla_spmd.checkpoint import parts
from xla_spmd.checkpoint.state_dicts import StateDict, StateValue


class SPMDSavePlanner(DefaultSavePlanner):
    """Writes each part of a split tensor once, and copies it from its device only when it is written.

    Use it as ``torch.distributed.checkpoint.save(state_dict, ..., planner=SPMDSavePlanner())``. If the state dict
    has been flattened already, ``paths`` has the path of each of its keys in the original one (default: None).
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
        """Flatten ``state_dict``, and replace its tensors by their parts."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        if self._paths is not None:
            self.mappings = dict(self._paths)
        self.state_dict = {name: parts.to_write(value) for name, value in self.state_dict.items()}

    def lookup_object(self, index: MetadataIndex) -> StateValue:
        """The value to write for ``index``: a part of a tensor, or another value."""
        value = self.state_dict[index.fqn]
        return value.part(index) if isinstance(value, _WRITTEN) else super().lookup_object(index)


class SPMDLoadPlanner(DefaultLoadPlanner):
    """Reads into the tensors of a state dict in place; each process reads the parts that it holds.

    Use it as ``torch.distributed.checkpoint.load(state_dict, ..., planner=SPMDLoadPlanner())``. The tensors must be
    on the device and keep their shardings, which may differ from those with which they were saved. Optimizers have
    no state to read into before their first step: see ``prime_optimizer``.
    """

    state_dict: StateDict

    def set_up_planner(
        self,
        state_dict: StateDict,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten ``state_dict``, and replace its tensors by memory for their parts."""
        # torch's planner replaces values of unknown classes by None: restore them afterwards
        rows = list(_rows_in(state_dict, ()))
        super().set_up_planner(state_dict, metadata, is_coordinator)
        for path, container, value in rows:
            container[path[-1]] = self.state_dict[".".join(map(str, path))] = value
        self.state_dict = {name: parts.to_load(value) for name, value in self.state_dict.items()}

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The memory into which the part at ``index`` is read."""
        value = self.state_dict[index.fqn]
        return value.part(index) if isinstance(value, _LOADED) else super().lookup_tensor(index)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Count what was read. When all parts of a tensor are complete, the tensor gets its value."""
        value = self.state_dict[read_item.dest_index.fqn]
        if isinstance(value, _LOADED):
            value.arrived(math.prod(read_item.lengths))


def _rows_in(
    container: StateValue, path: tuple[object, ...]
) -> Iterator[tuple[tuple[object, ...], dict[object, object], parts.Rows]]:
    """The ``Rows`` in nested dicts, each with its path and the dict that contains it."""
    for key, value in container.items():
        if isinstance(value, parts.Rows):
            yield (*path, key), container, value
        elif isinstance(value, dict):
            yield from _rows_in(value, (*path, key))


_WRITTEN = (parts.DeviceParts, parts.HostParts, parts.RowsToWrite)
_LOADED = (parts.LoadedParts, parts.LoadedCopy, parts.RowsToLoad)
