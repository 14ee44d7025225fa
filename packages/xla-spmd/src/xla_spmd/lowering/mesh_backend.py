"""``MeshBackend``: all devices of a job as the one device behind ``xla:0``."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from xla_core.contract.device_protocol import ArraySpec, Buffer, DeviceClient, Placement, Program
from xla_core.extension_api import lowering
from xla_core.extension_api.backends import (
    Backend,
    DeviceBackend,
    Kept,
    Layout,
    Recorder,
    Storage,
    Table,
    hold,
    make_room,
)
from xla_core.extension_api.steps import Entry, TensorMeta, inputs_of, operations_of
from xla_core.extension_api.tensors import exact_buffer, numpy_dtype
from xla_core.support import counters, indivisible
from xla_spmd.lowering import gradient_sharding
from xla_spmd.lowering.annotation_ops import TO_SHARD, TO_WHOLE, annotating
from xla_spmd.lowering.automatic_sharding import AutomaticSharding
from xla_spmd.lowering.propagation import annotated, output_shardings
from xla_spmd.lowering.uneven_dims import padding
from xla_spmd.sharding import mode
from xla_spmd.sharding.annotation import storage_annotation
from xla_spmd.sharding.hlo_sharding import REPLICATED, canonical, parse
from xla_spmd.sharding.shardy import ShardyMesh, common_mesh

MADE_WHOLE: Final = "ReplicateShardedData"
"""Counts values that were split and are put together: for the host, or on every device."""


class HostValue:
    """A value that no device has yet: annotated before it is used, it never is whole on a device.

    ``placed`` is the buffer once it was needed.
    """

    __slots__ = ("__weakref__", "array", "placed")

    def __init__(self, array: np.ndarray) -> None:
        self.array: np.ndarray | None = array
        self.placed: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The value's shape."""
        return tuple(self.placed.shape if self.array is None else self.array.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which the device keeps it."""
        return np.dtype(self.placed.dtype if self.array is None else self.array.dtype)

    def is_ready(self) -> bool:
        """Whether the value is there."""
        return self.placed is None or bool(self.placed.is_ready())


class MeshBackend(DeviceBackend):
    """All devices of the job; buffers are whole values, split as each was annotated."""

    runs_counter = "ExecuteReplicated"
    runs_metric = "ExecuteReplicatedTime"
    virtual_name = "SPMD:0"

    def __init__(self, client: DeviceClient) -> None:
        super().__init__(client, 0)
        self.devices = tuple(d.id for d in client.devices())
        self.placement = Placement(self.devices)
        self._mine = frozenset(d.id for d in client.local_devices())
        self._canonical: dict[str | None, str | None] = {}
        self._movers = Table()
        self.automatic = AutomaticSharding(self)

    @property
    def count(self) -> int:
        """The number of devices."""
        return len(self.devices)

    def sharding_text(self, storage: Storage) -> str | None:
        """How the user wants a tensor split over the devices."""
        annotation = storage_annotation(storage)
        return None if annotation is None else annotation.sharding.text

    def shard_count(self) -> int:
        """Into how many parts a tensor is split: one per device."""
        return self.count

    # -- transfers -----------------------------------------------------------------------------

    def put(self, array: np.ndarray) -> Buffer:
        """Keep a copy of a host array until it is used or annotated; ahead of time, its shape."""
        if self.shapes_only:
            return super().put(array)
        return HostValue(np.array(array, self.numpy_dtype(array.dtype)))

    def allocate(self, meta: TensorMeta, sharding: str | None = None) -> Buffer:
        """Memory without a value, laid out as ``sharding``; None: whole on every device."""
        spec = ArraySpec(meta.shape, self.numpy_dtype(numpy_dtype(meta.dtype)), sharding)
        return self.client.allocate(spec, Placement(self.devices, sharding))

    def place(self, value: HostValue, sharding: str | None = None) -> Buffer:
        """The buffer of a host value, laid out as ``sharding`` if no device has it yet."""
        if value.placed is None:
            assert value.array is not None
            placed = self.transfer(value.array, Placement(self.devices, sharding))
            indivisible.do(indivisible.storing(value, ("placed", "array"), (placed, None)))
        return value.placed

    def get(self, buffer: Buffer) -> np.ndarray:
        """Wait for a value and copy it to the host, wherever its parts are."""
        if type(buffer) is HostValue:
            if buffer.array is not None:
                return buffer.array.copy()
            buffer = buffer.placed
        return super().get(self.readable(buffer))

    def readable(self, buffer: Buffer) -> Buffer:
        """``buffer``, or its value whole on every device where this process lacks a part of it.

        Every process of the job has to call it then: they gather the value together.
        """
        if not parse(self.client.placement_of(buffer).sharding).tiles:
            return buffer
        if len(self._mine) < self.count:
            return self.move(buffer, None)
        counters.increment(MADE_WHOLE)
        return buffer

    def copy(self, buffer: Buffer) -> Buffer:
        """A second buffer with the same value and the same sharding."""
        return self.move(buffer, self.sharding_of(buffer))

    def copy_from(self, buffer: Buffer, origin: Backend) -> Buffer:
        """The value of another device's buffer."""
        return self.put(origin.get(buffer))

    def sharding_of(self, buffer: Buffer) -> str | None:
        """The canonical HLO sharding of a buffer; None where it is whole on every device."""
        if type(buffer) is HostValue:
            if buffer.placed is None:
                return None
            buffer = buffer.placed
        return canonical(self.client.placement_of(buffer).sharding)

    def move(self, buffer: Any, sharding: str | None) -> Buffer:
        """The same value laid out as ``sharding``, by a program: parts go from device to device.

        A value from before SPMD mode, on one device, goes through the host.
        """
        if self.client.placement_of(buffer).devices != self.devices:
            return self._from_one_device(buffer, sharding)
        source = self.sharding_of(buffer)
        if parse(source).tiles and not parse(sharding).tiles:
            counters.increment(MADE_WHOLE)
        spec = ArraySpec(tuple(buffer.shape), np.dtype(buffer.dtype), source)
        key = (spec, sharding)
        mover = self._movers.get(key)
        if mover is None:
            make_room(1)
            mover = Kept(self.client.compile(self._mover(spec, sharding)))
            mover.keep(self._movers, key)
            hold(mover)
        mover.mark_used()
        return mover.executable.execute([buffer])[0]

    def _mover(self, spec: ArraySpec, sharding: str | None) -> Program:
        wanted = sharding or REPLICATED.text
        shardings = (spec.sharding or REPLICATED.text, wanted)
        annotations = _annotations(shardings, (len(spec.shape),) * 2, self._mesh(shardings))
        function, padded = padding(
            shardings[:1], shardings[1:], annotations[:1], annotations[1:], _identity, [spec]
        )
        stablehlo = lowering.lower_function(
            function, padded, [], self.platform, "move",
            num_partitions=self.count,
            input_shardings=annotations[:1], output_shardings=annotations[1:],
        )  # fmt: skip
        return Program(
            name="move", stablehlo=stablehlo, inputs=(spec,),
            outputs=(ArraySpec(spec.shape, spec.dtype, wanted),), aliases=(),
            placement=self.placement, num_partitions=self.count,
        )  # fmt: skip

    # -- steps ---------------------------------------------------------------------------------

    def input_layouts(self, trace: Recorder) -> tuple[str | None, ...]:
        """The shardings of the step's inputs; those that no device has are put whole on all."""
        if mode.is_automatic():
            self.automatic.prepare(trace)
        placement_of = self.client.placement_of
        canonical_texts = self._canonical
        devices = self.devices
        layouts = []
        for slot, buffer in enumerate(trace.inputs):
            storage = trace.touched[trace.input_storages[slot]]
            annotation = getattr(storage, "annotation", None)
            wanted = annotation.text if annotation is not None else None
            if type(buffer) is HostValue:
                buffer = self._replace(trace, slot, self.place(buffer, wanted))
                storage.annotate(annotation)
            placement = placement_of(buffer)
            if placement.devices != devices:
                buffer = self._replace(trace, slot, self._from_one_device(buffer, wanted))
                placement = placement_of(buffer)
            text = placement.sharding
            if text not in canonical_texts:
                canonical_texts[text] = canonical(text)
            text = canonical_texts[text]
            if annotation is not None and text != wanted:
                # the tensor took over another one's value
                self._replace(trace, slot, self.move(buffer, wanted))
                text = wanted
            layouts.append(text)
        return tuple(layouts)

    def argument_layouts(self, storages: Iterable[Storage]) -> Hashable:
        """The shardings of tensors that a recorded graph is called with; runs what is pending."""
        layouts = []
        for storage in storages:
            storage.trace.compute(storage)
            unwritten = storage.buffer is None
            layouts.append(None if unwritten else self.sharding_of(self.device_buffer(storage)))
        return tuple(layouts)

    def device_buffer(self, storage: Storage) -> Buffer:
        """The buffer of a tensor over all devices, put there now if need be."""
        buffer = storage.buffer
        annotation = storage_annotation(storage)
        wanted = annotation.text if annotation is not None else None
        if type(buffer) is HostValue:
            buffer = self.place(buffer, wanted)
            storage.relocate(buffer)
            storage.annotate(annotation)
        elif self.client.placement_of(buffer).devices != self.devices:
            buffer = self._from_one_device(buffer, wanted)
            storage.relocate(buffer)
        return buffer

    def buffer_for_copy(self, storage: Storage, buffer: Buffer) -> Buffer:
        """The buffer for a tensor that takes over another one's value: laid out as it was annotated.

        A value that no device has yet goes to them in that layout, for both tensors: it is whole nowhere.
        """
        annotation = storage_annotation(storage)
        return buffer if annotation is None else self.resharded(buffer, annotation.text)

    def resharded(self, buffer: Buffer, sharding: str | None) -> Buffer:
        """The same value laid out as ``sharding``; one that no device has is not put there to be whole."""
        if type(buffer) is HostValue and buffer.placed is None:
            return buffer if sharding is None else self.place(buffer, sharding)
        if type(buffer) is HostValue:
            buffer = buffer.placed
        return buffer if self.sharding_of(buffer) == sharding else self.move(buffer, sharding)

    def is_whole(self, buffer: Any) -> bool:
        """Whether a value is on no device yet, or, ahead of time, has a shape that was not split."""
        if type(buffer) is HostValue:
            return buffer.placed is None
        return self.shapes_only and self.sharding_of(buffer) is None

    def lay_input(self, trace: Recorder, slot: int, sharding: str | None) -> None:
        """Lay an input of the pending step out as ``sharding``, and with it the tensor that it came from."""
        buffer = trace.inputs[slot]
        if self.shapes_only:
            spec = ArraySpec(tuple(buffer.shape), np.dtype(buffer.dtype), sharding)
            buffer = self.client.allocate(spec, Placement(self.devices, sharding))
        elif type(buffer) is HostValue and buffer.placed is None:
            buffer = self.place(buffer, sharding)
        else:
            buffer = buffer.placed if type(buffer) is HostValue else buffer
            if self.sharding_of(buffer) != sharding:
                buffer = self.move(buffer, sharding)
        self._replace(trace, slot, buffer)

    def _replace(self, trace: Recorder, slot: int, buffer: object) -> Any:
        """Give a step's input, and the tensor that it came from, another buffer of its value."""
        former = trace.inputs[slot]
        storage = trace.touched[trace.input_storages[slot]]
        if storage.buffer is former:
            storage.relocate(buffer)
        trace.inputs[slot] = buffer
        return buffer

    def _from_one_device(self, buffer: object, sharding: str | None) -> Any:
        return self.transfer(
            self.client.get(exact_buffer(buffer)), Placement(self.devices, sharding)
        )

    def layout(
        self,
        trace: Recorder,
        entries: Sequence[Entry],
        outputs: Sequence[int],
        aliases: tuple[tuple[int, int], ...],
    ) -> Layout:
        """The layout of a program over all devices: inputs as they lie, outputs by ``propagation``."""
        return self.layout_from(trace, entries, outputs, aliases, self.input_layouts(trace))

    def layout_from(
        self,
        trace: Recorder,
        entries: Sequence[Entry],
        outputs: Sequence[int],
        aliases: tuple[tuple[int, int], ...],
        layouts: Sequence[str | None],
    ) -> Layout:
        """The same with inputs that lie as ``layouts`` say: canonical HLO shardings, None for a whole value."""
        numbers = bool(entries[-1].floats) + bool(entries[-1].ints)
        inputs = [text or REPLICATED.text for text in layouts] + [REPLICATED.text] * numbers
        vids = [entry.first for entry in inputs_of(entries)]
        known = dict(zip(vids, inputs, strict=False))
        fixed = {outputs[target]: inputs[source] for source, target in aliases}
        fixed |= gradient_sharding.shardings(trace)
        fixed |= _annotated_storages(trace)
        marks = annotated(entries)
        fixed |= marks
        results = output_shardings(entries, outputs, known, fixed)
        metas = {e.first + i: m for e in entries for i, m in enumerate(e.metas) if m is not None}
        ranks = [len(metas[v].shape) for v in vids] + [1] * numbers
        wanted = {*inputs, *marks.values(), *(text for text in results if text is not None)}
        mesh = None if _has_manual(entries) else self._mesh(wanted)
        out_ranks = [len(metas[v].shape) for v in outputs]
        input_annotations = _annotations(inputs, ranks, mesh)
        output_annotations = _annotations(results, out_ranks, mesh)
        return Layout(
            placement=self.placement,
            aliases=tuple((i, o) for i, o in aliases if inputs[i] == results[o]),
            num_partitions=self.count,
            inputs=tuple(None if text == REPLICATED.text else text for text in inputs),
            outputs=tuple(results),
            input_annotations=input_annotations,
            output_annotations=output_annotations,
            edges=functools.partial(
                padding, inputs, results, input_annotations, output_annotations
            ),
            lowering=functools.partial(annotating, None if mesh is None else mesh.translate),
        )

    def _mesh(self, texts: Any) -> ShardyMesh | None:
        return common_mesh(map(parse, texts), self.count)


def _annotated_storages(trace: Recorder) -> dict[int, str]:
    """The pending values of annotated tensors."""
    shardings = {}
    for storage in trace.touched:
        annotation = storage_annotation(storage)
        if annotation is not None and storage.is_pending_in(trace.epoch):
            shardings[storage.vid] = annotation.sharding.text
    return shardings


def _identity(value: object) -> tuple[Any]:
    return (value,)


def _annotations(
    texts: Sequence[str | None], ranks: Sequence[int], mesh: ShardyMesh | None
) -> tuple[str | None, ...]:
    """Shardings in the form that the program's partitioner reads; None stays None."""
    return tuple(
        text if text is None or mesh is None else mesh.translate(text, rank)
        for text, rank in zip(texts, ranks, strict=True)
    )


def _has_manual(entries: Sequence[Entry]) -> bool:
    manual = (TO_SHARD, TO_WHOLE)
    return any(operation.plan.overload in manual for operation in operations_of(entries))
