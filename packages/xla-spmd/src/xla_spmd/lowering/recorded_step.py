"""A recorded step in the form from which shardings are chosen: inputs with names and roles, and trial programs."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import torch
from torch import nn

from xla_core.contract.device_protocol import Buffer, DeviceClient, Executable
from xla_core.contract.step_sharding import (
    DATA,
    OTHER,
    PARAMETER,
    STATE,
    Axes,
    PartitionSpec,
    StepInput,
)
from xla_core.extension_api import programs
from xla_core.extension_api.backends import Layout, Recorder, Storage
from xla_core.extension_api.steps import Entry, Trace, products, wanted
from xla_core.extension_api.tensors import XLATensor, storage_of
from xla_spmd.sharding.annotation import Annotation, checked_annotation, storage_annotation
from xla_spmd.sharding.mesh import Mesh

_NAME: Final = "automatic_sharding_trial"


class DevicesAsOne(Protocol):
    """The members of ``MeshBackend`` that are used here, where it cannot be imported. It documents them."""

    client: DeviceClient

    @property
    def count(self) -> int:
        """The number of devices."""
        ...

    def sharding_of(self, buffer: Buffer) -> str | None:
        """The sharding of a buffer."""
        ...

    def has_no_layout(self, buffer: Buffer) -> bool:
        """Whether no layout was chosen for a value yet."""
        ...

    def reshard_input(self, trace: Recorder, slot: int, sharding: str | None) -> None:
        """Reshard an input of the pending step."""
        ...

    def layout_from(
        self,
        trace: Recorder,
        entries: Sequence[Entry],
        outputs: Sequence[int],
        aliases: tuple[tuple[int, int], ...],
        layouts: Sequence[str | None],
    ) -> Layout:
        """The layout of the step's program with inputs of these shardings."""
        ...


class Owners:
    """The parameters, buffers and optimizer state of the process, by the ids of their storages.

    ``leaves`` has the parameters and other leaf tensors that need a gradient, ``buffers`` the storages of module
    buffers, ``names`` the names of all three kinds.
    """

    def __init__(self) -> None:
        # type(), because isinstance() would run the __class__ of arbitrary objects (proxies)
        objects = [o for o in gc.get_objects() if issubclass(type(o), _OWNER_TYPES)]
        modules = [o for o in objects if isinstance(o, nn.Module)]
        self.leaves: dict[int, torch.Tensor] = {}
        self.buffers: set[int] = set()
        self.names: dict[int, str] = {}
        inner = {id(child) for module in modules for child in module.children()}
        # outermost modules first, because their names of parameters are the full ones
        for module in sorted(modules, key=lambda m: id(m) in inner):
            for name, parameter in module.named_parameters():
                self._add_leaf(parameter, name)
            for name, buffer in module.named_buffers():
                if isinstance(buffer, XLATensor):
                    self.buffers.add(id(storage_of(buffer)))
                    self.names.setdefault(id(storage_of(buffer)), name)
        for tensor in objects:
            if isinstance(tensor, XLATensor) and tensor.requires_grad and tensor.is_leaf:
                self._add_leaf(tensor, "")
        for optimizer in objects:
            if isinstance(optimizer, torch.optim.Optimizer):
                self._name_state(optimizer.state)

    def _add_leaf(self, tensor: torch.Tensor, name: str) -> None:
        if isinstance(tensor, XLATensor):
            self.leaves.setdefault(id(storage_of(tensor)), tensor)
            if name:
                self.names.setdefault(id(storage_of(tensor)), name)

    def _name_state(self, state: Mapping[object, object]) -> None:
        for parameter, values in state.items():
            if not isinstance(parameter, XLATensor) or not isinstance(values, Mapping):
                continue
            owner = self.names.get(id(storage_of(parameter)), "a parameter")
            for key, value in values.items():
                if isinstance(value, XLATensor):
                    self.names.setdefault(id(storage_of(value)), f"{key} of {owner}")


_OWNER_TYPES: Final = (nn.Module, torch.optim.Optimizer, XLATensor)


class RecordedStep:
    """The pending step of ``trace``, as a ``StepToSplit``; it is valid until the step runs.

    ``trains`` says whether the step replaces parameters.
    """

    def __init__(self, backend: DevicesAsOne, trace: Trace, owners: Owners) -> None:
        self._backend = backend
        self._trace = trace
        self._outputs = tuple(wanted(self._trace)[2])
        self._entries: Sequence[Entry] = self._trace.cur.path()
        self.devices = backend.count
        self.kind = backend.client.devices()[0].kind
        self.limit = backend.client.memory_info(0).bytes_limit
        self.flops = float(sum(count for _, count in products(self._entries)))
        shapes = {tuple(leaf.shape) for leaf in owners.leaves.values()}
        storages = [trace.touched[position] for position in trace.input_storages]
        self.inputs = [self._describe(s, owners, shapes) for s in storages]
        self.trains = any(id(s) in owners.leaves and s.is_pending_in(trace.epoch) for s in storages)

    def _describe(
        self, storage: Storage, owners: Owners, shapes: set[tuple[int, ...]]
    ) -> StepInput:
        """Name and role of the input ``storage``; ``shapes`` are those of all parameters."""
        shape, key = tuple(storage.meta.shape), id(storage)
        replaced = storage.is_pending_in(self._trace.epoch)
        if key in owners.leaves:
            role = PARAMETER
        elif replaced and storage.meta.dtype.is_floating_point and shape in shapes:
            role = STATE
        elif key in owners.buffers or replaced or not shape:
            role = OTHER
        else:
            role = DATA
        name = owners.names.get(key, f"{role} {str(storage.meta.dtype)[6:]}{list(shape)}")
        annotated = storage_annotation(storage) is not None
        return StepInput(name, role, shape, storage.meta.dtype.itemsize, annotated)

    def annotations(
        self, axes: Axes, specs: Sequence[PartitionSpec | None]
    ) -> list[Annotation | None]:
        """For each input, the annotation that its spec describes on a mesh with these axes; None without a spec."""
        names, sizes = zip(*axes, strict=True)
        mesh = Mesh(np.arange(self.devices), sizes, names)
        return [
            None if spec is None else checked_annotation(mesh, spec, one.shape)
            for one, spec in zip(self.inputs, specs, strict=True)
        ]

    def compiled(self, axes: Axes, specs: Sequence[PartitionSpec | None]) -> Executable:
        """The step's compiled program with inputs split by ``specs`` (None: as they are). Moves no values."""
        backend, trace = self._backend, self._trace
        layouts = []
        for slot, annotation in enumerate(self.annotations(axes, specs)):
            own = storage_annotation(trace.touched[trace.input_storages[slot]])
            if annotation is not None or own is not None:
                layouts.append((annotation or own).text)  # type: ignore[union-attr]
            else:
                layouts.append(backend.sharding_of(trace.inputs[slot]))
        layout = backend.layout_from(trace, self._entries, self._outputs, self._aliases(), layouts)
        program = programs.lower_step(trace, self._entries, self._outputs, layout, _NAME)
        return programs.compile_program(backend.client, program)

    def _aliases(self) -> tuple[tuple[int, int], ...]:
        """Pairs of an input that the step replaces and the output that replaces it."""
        trace = self._trace
        output_indices = {vid: index for index, vid in enumerate(self._outputs)}
        pairs = []
        for slot, position in enumerate(trace.input_storages):
            storage = trace.touched[position]
            if storage.is_pending_in(trace.epoch) and storage.vid in output_indices:
                pairs.append((slot, output_indices.pop(storage.vid)))
        return tuple(pairs)
