"""Tensors over all devices, assembled from the parts of this process's devices, which are CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from xla_core.contract.device_protocol import ArraySpec, Placement
from xla_core.extension_api import tensors
from xla_core.extension_api.runtime import trace_of
from xla_core.extension_api.steps import tensor_meta
from xla_core.extension_api.tensors import XLATensor, storage_of
from xla_spmd.lowering.uneven_dims import filled_up
from xla_spmd.sharding.hlo_sharding import Sharding
from xla_spmd.sharding.op_sharding import annotation_by
from xla_spmd.tensors.marking import mesh_backend

MSG_COUNT: Final = (
    "got {got} shards for {wanted} devices: give one for each device of this process, in device "
    "order"
)
MSG_SHAPE: Final = (
    "shard {number} has shape {got} and dtype {dtype}; for a tensor of shape {shape} split as {text} it must "
    "have shape {wanted}, or {own} without padding, and dtype {expected}"
)


def assembled(
    shards: Sequence[torch.Tensor], sharding: Sharding, shape: Sequence[int] | None = None
) -> XLATensor:
    """The tensor of ``shape`` whose parts on the devices of this process are ``shards``, in device order.

    ``shape`` defaults to that of a tensor whose parts all have the shape of the first one. A part that is shorter
    than the others, because the tensor does not divide evenly, may be padded or not. Raises ValueError for a wrong
    number of shards, or for one with a wrong shape or dtype.
    """
    trace = trace_of(None)
    backend = mesh_backend(trace)
    local = sorted(backend.devices.index(d.id) for d in backend.client.local_devices())
    if len(shards) != len(local):
        raise ValueError(MSG_COUNT.format(got=len(shards), wanted=len(local)))
    first = shards[0]
    whole = _whole(first.shape, sharding) if shape is None else tuple(shape)
    annotation = annotation_by(sharding, whole)
    part_shape, indices = sharding.shard_shape(whole), sharding.indices(whole)
    parts = []
    for number, (device, shard) in enumerate(zip(local, shards, strict=True)):
        part = indices.get(device)
        own = part_shape if part is None else tuple(s.stop - s.start for s in part)
        if tuple(shard.shape) not in (part_shape, own) or shard.dtype != first.dtype:
            text = MSG_SHAPE.format(
                number=number, got=tuple(shard.shape), dtype=shard.dtype, shape=whole,
                text=sharding.text, wanted=part_shape, own=own, expected=first.dtype,
            )  # fmt: skip
            raise ValueError(text)
        array = filled_up(tensors.to_numpy(shard), part_shape)
        array = array.astype(backend.numpy_dtype(array.dtype), copy=False)
        parts.append(backend.client.put(array, Placement((backend.devices[device],))))
    spec = ArraySpec(whole, array.dtype, annotation.text)
    buffer = backend.client.assemble(parts, spec, Placement(backend.devices, annotation.text))
    tensor = trace.from_buffer(buffer, tensor_meta(whole, first.dtype))
    storage_of(tensor).annotate(annotation)
    return tensor


def _whole(part: Sequence[int], sharding: Sharding) -> tuple[int, ...]:
    if not sharding.tiles:
        return tuple(part)
    return tuple(n * parts for n, parts in zip(part, sharding.per_dimension, strict=True))
