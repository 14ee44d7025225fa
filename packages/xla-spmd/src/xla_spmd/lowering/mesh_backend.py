"""``MeshBackend``: all devices of a job as the one device behind ``xla:0``."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

import numpy as np

from xla_core.contract.device_protocol import ArraySpec, Buffer, DeviceClient, Placement, Program
from xla_core.contract.foreign_values import ForeignObject
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
from xla_core.extension_api.steps import Entry, TensorMeta, inputs_of
from xla_core.extension_api.tensors import exact_buffer, numpy_dtype
from xla_core.support import counters, indivisible
from xla_spmd.lowering import gradient_sharding
from xla_spmd.lowering.annotation_ops import numbering
from xla_spmd.lowering.automatic_sharding import AutomaticSharding
from xla_spmd.lowering.gathering import Gathering
from xla_spmd.lowering.propagation import annotated, output_shardings
from xla_spmd.lowering.uneven_dims import padding
from xla_spmd.sharding import mode
from xla_spmd.sharding.annotation import storage_annotation
from xla_spmd.sharding.hlo_sharding import MANUAL, REPLICATED, canonical, parse
from xla_spmd.sharding.shardy import ShardyMesh, common_mesh

MADE_WHOLE: Final = "ReplicateShardedData"
"""The counter of split values whose parts were put together, on the host or on every device."""
MSG_PARTS: Final = (
    "this tensor is a part, and each device has its own; to read them, make a whole tensor of them with "
    "xs.disable_manual_sharding(part, partition_spec, full_shape)"
)


class HostValue:
    """A value that is kept on the host until a program needs it.

    If it is annotated before then, no device ever holds the whole of it. Once the value is on the devices,
    ``placed`` is its buffer, and ``array`` is None.
    """

    __slots__ = ("__weakref__", "array", "placed")

    def __init__(self, array: np.ndarray) -> None:
        self.array: np.ndarray | None = array
        self.placed: ForeignObject = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The value's shape."""
        return tuple(self.placed.shape if self.array is None else self.array.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype that the value has on the devices."""
        return np.dtype(self.placed.dtype if self.array is None else self.array.dtype)

    def is_ready(self) -> bool:
        """Whether the value is on the host, or has arrived on the devices."""
        return self.placed is None or bool(self.placed.is_ready())


class MeshBackend(DeviceBackend):
    """All devices of the job as one device. A buffer is a whole value, split over the devices by its sharding."""

    runs_counter = "ExecuteReplicated"
    runs_metric = "ExecuteReplicatedTime"
    virtual_name = "SPMD:0"

    def __init__(self, client: DeviceClient) -> None:
        super().__init__(client, 0)
        self.devices = tuple(d.id for d in client.devices())
        self.placement = Placement(self.devices)
        self._local = frozenset(d.id for d in client.local_devices())
        self._canonical: dict[str | None, str | None] = {}
        self._movers = Table()
        self.automatic = AutomaticSharding(self)

    @property
    def count(self) -> int:
        """The number of devices."""
        return len(self.devices)

    def sharding_text(self, storage: Storage) -> str | None:
        """The HLO sharding that the user gave a tensor, or None."""
        annotation = storage_annotation(storage)
        return None if annotation is None else annotation.sharding.text

    def shard_count(self) -> int:
        """The number of shards of a tensor: one per device."""
        return self.count

    # -- transfers -----------------------------------------------------------------------------

    def put(self, array: np.ndarray) -> Buffer:
        """Copy a host array, to be placed when it is used or annotated; ahead of time, keep only its shape."""
        if self.shapes_only:
            return super().put(array)
        return HostValue(np.array(array, self.numpy_dtype(array.dtype)))

    def allocate(self, meta: TensorMeta, sharding: str | None = None) -> Buffer:
        """Uninitialized memory for a value with this ``sharding``; None means whole on every device."""
        spec = ArraySpec(meta.shape, self.numpy_dtype(numpy_dtype(meta.dtype)), sharding)
        return self.client.allocate(spec, Placement(self.devices, sharding))

    def place(self, value: HostValue, sharding: str | None = None) -> Buffer:
        """The buffer of a host value; if no device has it yet, it is sent to the devices with this ``sharding``."""
        if value.placed is None:
            assert value.array is not None
            placed = self.transfer(value.array, Placement(self.devices, sharding))
            # both attributes in one call into C: an interrupt in between would lose the value
            indivisible.do(indivisible.storing(value, ("placed", "array"), (placed, None)))
        return value.placed

    def get(self, buffer: Buffer) -> np.ndarray:
        """Wait for a value and copy the whole of it to the host."""
        if type(buffer) is HostValue:
            if buffer.array is not None:
                return buffer.array.copy()
            buffer = buffer.placed
        return super().get(self.readable(buffer))

    def readable(self, buffer: Buffer) -> Buffer:
        """A buffer with the same value, all of whose parts this process has.

        It is ``buffer`` itself if it is not split, or if this process has all devices. Otherwise the value is
        gathered on every device, and all processes of the job must call this together. Raises RuntimeError for
        parts, which each device computes by itself.
        """
        sharding = parse(self.client.placement_of(buffer).sharding)
        if sharding == MANUAL:
            raise RuntimeError(MSG_PARTS)
        if not sharding.tiles:
            return buffer
        if len(self._local) < self.count:
            return self.move(buffer, None)
        counters.increment(MADE_WHOLE)
        return buffer

    def copy(self, buffer: Buffer) -> Buffer:
        """A second buffer with the value and sharding of ``buffer``."""
        return self.move(buffer, self.sharding_of(buffer))

    def copy_from(self, buffer: Buffer, origin: Backend) -> Buffer:
        """The value of a buffer of the backend ``origin``, copied by way of the host."""
        return self.put(origin.get(buffer))

    def sharding_of(self, buffer: Buffer) -> str | None:
        """The canonical HLO sharding of a buffer; None if it is whole on every device."""
        if type(buffer) is HostValue:
            if buffer.placed is None:
                return None
            buffer = buffer.placed
        return canonical(self.client.placement_of(buffer).sharding)

    def move(self, buffer: ForeignObject, sharding: str | None) -> Buffer:
        """A buffer with the same value and the given ``sharding``. A program moves the parts between devices.

        A value that is on one device, from before SPMD mode, is copied by way of the host.
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
        target = sharding or REPLICATED.text
        shardings = (spec.sharding or REPLICATED.text, target)
        function, padded = padding(shardings[:1], shardings[1:], _identity, [spec])
        stablehlo = lowering.lower_function(
            function, padded, [], self.platform, "move",
            num_partitions=self.count, mesh_of=self._mesh,
            input_shardings=shardings[:1], output_shardings=shardings[1:],
        )  # fmt: skip
        return Program(
            name="move", stablehlo=stablehlo, inputs=(spec,),
            outputs=(ArraySpec(spec.shape, spec.dtype, target),), aliases=(),
            placement=self.placement, num_partitions=self.count,
        )  # fmt: skip

    # -- steps ---------------------------------------------------------------------------------

    def input_layouts(self, trace: Recorder) -> tuple[str | None, ...]:
        """The shardings of the step's inputs, after placing and resharding them as they are annotated.

        An input that no device has yet and that is not annotated is placed whole on every device.
        """
        if mode.is_automatic():
            self.automatic.prepare(trace)
        placement_of = self.client.placement_of
        canonical_texts = self._canonical
        devices = self.devices
        layouts = []
        for slot, buffer in enumerate(trace.inputs):
            storage = trace.touched[trace.input_storages[slot]]
            annotation = getattr(storage, "annotation", None)
            annotated_text = annotation.text if annotation is not None else None
            if type(buffer) is HostValue:
                buffer = self._replace(trace, slot, self.place(buffer, annotated_text))
                storage.annotate(annotation)
            placement = placement_of(buffer)
            if placement.devices != devices:
                buffer = self._replace(trace, slot, self._from_one_device(buffer, annotated_text))
                placement = placement_of(buffer)
            text = placement.sharding
            if text not in canonical_texts:
                canonical_texts[text] = canonical(text)
            text = canonical_texts[text]
            if annotation is not None and text != annotated_text:
                # the tensor has taken over the value of another one, which was split otherwise
                self._replace(trace, slot, self.move(buffer, annotated_text))
                text = annotated_text
            layouts.append(text)
        return tuple(layouts)

    def argument_layouts(self, storages: Iterable[Storage]) -> Hashable:
        """The shardings of the arguments of a recorded graph, whose pending values are computed first."""
        layouts = []
        for storage in storages:
            storage.trace.compute(storage)
            unwritten = storage.buffer is None
            layouts.append(None if unwritten else self.sharding_of(self.device_buffer(storage)))
        return tuple(layouts)

    def device_buffer(self, storage: Storage) -> Buffer:
        """The buffer of a tensor on all devices, to which its value is moved if it is not there yet."""
        buffer: ForeignObject = storage.buffer
        annotation = storage_annotation(storage)
        annotated_text = annotation.text if annotation is not None else None
        if type(buffer) is HostValue:
            buffer = self.place(buffer, annotated_text)
            storage.relocate(buffer)
            storage.annotate(annotation)
        elif self.client.placement_of(buffer).devices != self.devices:
            buffer = self._from_one_device(buffer, annotated_text)
            storage.relocate(buffer)
        return buffer

    def buffer_for_copy(self, storage: Storage, buffer: Buffer) -> Buffer:
        """The buffer of a tensor that takes over the value of another one: it keeps its own annotated sharding.

        A value that no device has yet is placed with that sharding for both tensors, so that no device gets the
        whole of it.
        """
        annotation = storage_annotation(storage)
        return buffer if annotation is None else self.resharded(buffer, annotation.text)

    def resharded(self, buffer: Buffer, sharding: str | None) -> Buffer:
        """A buffer with the same value and the given ``sharding``.

        A value that no device has yet stays on the host if ``sharding`` is None, so that it can still be annotated.
        """
        if type(buffer) is HostValue and buffer.placed is None:
            return buffer if sharding is None else self.place(buffer, sharding)
        if type(buffer) is HostValue:
            buffer = buffer.placed
        return buffer if self.sharding_of(buffer) == sharding else self.move(buffer, sharding)

    def has_no_layout(self, buffer: Buffer) -> bool:
        """Whether a value is on no device yet; ahead of time, whether it is not split."""
        if type(buffer) is HostValue:
            return buffer.placed is None
        return self.shapes_only and self.sharding_of(buffer) is None

    def reshard_input(self, trace: Recorder, slot: int, sharding: str | None) -> None:
        """Give an input of the pending step, and the tensor that it comes from, the given ``sharding``."""
        buffer: ForeignObject = trace.inputs[slot]
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

    def _replace(self, trace: Recorder, slot: int, buffer: Buffer) -> Buffer:
        """Replace the buffer of a step's input by another one with the same value, and return it.

        The tensor that the input comes from gets it too, unless it has been given another value since.
        """
        previous = trace.inputs[slot]
        storage = trace.touched[trace.input_storages[slot]]
        if storage.buffer is previous:
            storage.relocate(buffer)
        trace.inputs[slot] = buffer
        return buffer

    def _from_one_device(self, buffer: Buffer, sharding: str | None) -> Buffer:
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
        """The layout of a step's program over all devices: inputs have their shardings, outputs get theirs.

        ``propagation`` chooses those of the outputs. ``aliases`` are pairs of an input and the output that may
        take its memory.
        """
        return self.layout_from(trace, entries, outputs, aliases, self.input_layouts(trace))

    def layout_from(
        self,
        trace: Recorder,
        entries: Sequence[Entry],
        outputs: Sequence[int],
        aliases: tuple[tuple[int, int], ...],
        layouts: Sequence[str | None],
    ) -> Layout:
        """The same with ``layouts`` as the shardings of the inputs: canonical HLO texts, None for a whole value."""
        # behind the step's inputs, the program takes one vector of the lifted floats and one of the lifted ints
        vectors = bool(entries[-1].floats) + bool(entries[-1].ints)
        inputs = [text or REPLICATED.text for text in layouts] + [REPLICATED.text] * vectors
        vids = [entry.first for entry in inputs_of(entries)]
        input_shardings = dict(zip(vids, inputs, strict=False))
        # later updates win: what the user annotated overrides what would otherwise follow
        fixed = {outputs[target]: inputs[source] for source, target in aliases}
        fixed |= gradient_sharding.shardings(trace)
        fixed |= _annotated_storages(trace)
        marks = annotated(entries)
        fixed |= marks
        results = output_shardings(entries, outputs, input_shardings, fixed)
        return Layout(
            placement=self.placement,
            # only values with equal shardings can share memory
            aliases=tuple((i, o) for i, o in aliases if inputs[i] == results[o]),
            num_partitions=self.count,
            inputs=tuple(None if text == REPLICATED.text else text for text in inputs),
            outputs=tuple(results),
            mesh_of=self._mesh,
            edges=functools.partial(padding, inputs, results),
            lowering=numbering,
            gathered=Gathering(entries, input_shardings, fixed, self.count),
        )

    def _mesh(self, texts: Iterable[str]) -> ShardyMesh | None:
        return common_mesh(map(parse, texts), self.count)


def _annotated_storages(trace: Recorder) -> dict[int, str]:
    """The HLO shardings of the pending values of annotated tensors, by value number."""
    shardings = {}
    for storage in trace.touched:
        annotation = storage_annotation(storage)
        if annotation is not None and storage.is_pending_in(trace.epoch):
            shardings[storage.vid] = annotation.sharding.text
    return shardings


def _identity(value: lowering.TracedValue) -> tuple[lowering.TracedValue]:
    return (value,)
