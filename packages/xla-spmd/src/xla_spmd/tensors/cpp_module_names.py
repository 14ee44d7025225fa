"""The functions of torch_xla's C++ module ``_XLAC`` that concern shardings. They take and return plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Final

import torch

from xla_core.extension_api import runtime
from xla_core.extension_api.operators import Operand
from xla_core.extension_api.steps import graph_of, needed_entries, operations_of
from xla_core.extension_api.tensors import XLATensor, storage_of
from xla_spmd.lowering.annotation_ops import TO_SHARD
from xla_spmd.lowering.manual_collectives import all_reduce as _xla_spmd_all_reduce
from xla_spmd.lowering.manual_collectives import reduce_scatter as _xla_spmd_reduce_scatter
from xla_spmd.sharding import mode
from xla_spmd.sharding.annotation import Annotation
from xla_spmd.sharding.hlo_sharding import MANUAL, Sharding, ShardingType
from xla_spmd.sharding.mesh import Mesh
from xla_spmd.sharding.op_sharding import OpSharding, annotation_by, from_lists
from xla_spmd.tensors import marking
from xla_spmd.tensors.assembling import assembled
from xla_spmd.tensors.input_sharding import ShardingSpec
from xla_spmd.tensors.manual_sharding import to_part, to_whole
from xla_spmd.tensors.marking import clear_sharding
from xla_spmd.tensors.sharded_tensor import (
    XLAShard,
    listed,
    load_local_shards_,
    local_shards,
    shard_indices,
    sharding_of,
    sharding_text,
    sharding_type,
    unwrap_sharded_tensor,
)

MSG_NOT_MANUAL: Final = "_mark_manual_sharding takes a sharding of type MANUAL, got {text}"
MSG_ANNOTATED: Final = "Existing annotation must be cleared first: {text}"
MSG_DATA: Final = (
    "Marking any data tensors as manual is not supported, nor are their results: the tensor must be pending and "
    "computed from parts, which xs.enable_manual_sharding(t, partition_spec) returns"
)
MSG_NO_SHARDING: Final = (
    "_spmd_full_to_shard_shape takes a tensor that is split, for example by xs.mark_sharding, and not "
    "manually sharded yet; its sharding is {text!r}"
)
MSG_WHOLE: Final = (
    "_spmd_shard_to_full_shape takes parts of shape {wanted} and dtype {dtype} for a tensor of shape "
    "{shape} split as {text}, got {got} and {got_dtype}"
)
MSG_SHARD_DEVICES: Final = (
    "_load_local_shards got shards for the devices {got}; this process has the devices {wanted}"
)


class XlaShardingSpec:
    """A sharding for a CPU tensor that will be sent to the devices.

    The parameters between ``tensor`` and ``minibatch`` are those of ``OpSharding``. With ``minibatch`` (default:
    False), ``tensor`` has only this process's rows of the global tensor: dimension 0 of the global tensor
    concatenates the rows of all processes.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        tile_assignment: Sequence[object],
        group_assignment: Sequence[object],
        replication_groups: Sequence[Sequence[int]],
        sharding_type: int,
        minibatch: bool = False,
    ) -> None:
        self.sharding = from_lists(
            tile_assignment, group_assignment, replication_groups, sharding_type
        )
        self.minibatch = minibatch
        self.global_shape = tuple(tensor.shape)
        if minibatch:
            client = runtime.client()
            processes = len({d.process_index for d in client.devices()})
            self.global_shape = (tensor.shape[0] * processes, *tensor.shape[1:])

    def send(self, tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """Send the CPU tensor ``tensor`` to ``device``, split by this sharding."""
        annotation = annotation_by(self.sharding, self.global_shape)
        if self.minibatch:
            return ShardingSpec(annotation.mesh, annotation.spec, True).send(tensor, device)
        sent = tensor.to(device)
        marking.apply_annotation(sent, annotation)
        return sent


# -- reading shardings and parts -------------------------------------------------------------------


def _get_xla_sharding_spec(tensor: torch.Tensor) -> str:
    """The tensor's HLO sharding, or an empty text if it has none."""
    return sharding_text(unwrap_sharded_tensor(tensor))


def _get_xla_sharding_specs(tensors: Sequence[torch.Tensor]) -> list[str]:
    """``_get_xla_sharding_spec`` of each tensor."""
    return [_get_xla_sharding_spec(t) for t in tensors]


def _get_xla_sharding_type(tensor: torch.Tensor) -> int | None:
    """The number of the tensor's ``ShardingType``, or None if it has no sharding."""
    kind = sharding_type(unwrap_sharded_tensor(tensor))
    return None if kind is None else int(kind)


def _get_xla_op_sharding(tensor: torch.Tensor) -> Sharding | None:
    """The tensor's sharding, or None if it has none."""
    return sharding_of(unwrap_sharded_tensor(tensor))


def _get_local_shards(tensors: Sequence[torch.Tensor]) -> list[list[tuple[torch.Tensor, str]]]:
    """For each tensor, the parts that this process holds, each with the name of its device."""
    by_tensor = [local_shards(unwrap_sharded_tensor(t)) for t in tensors]
    return [[(shard.data, shard.shard_device) for shard in shards] for shards in by_tensor]


def _get_local_shard_replica_and_indices(
    tensors: Sequence[Operand],
) -> list[list[tuple[int, Sequence[slice] | EllipsisType]]]:
    """For each part of each tensor, the number of the copy and the part's slices of the whole tensor."""
    by_tensor = [shard_indices(unwrap_sharded_tensor(t)) for t in tensors]
    return [[(copy, listed(indices)) for _, indices, copy in parts] for parts in by_tensor]


def _xla_get_auto_sharding() -> bool:
    """Whether shardings are chosen automatically, by ``xr.use_spmd(auto=True)``."""
    return mode.is_automatic()


def _xla_set_auto_sharding() -> None:
    """Call ``xr.use_spmd(auto=True)``."""
    mode.use_spmd(auto=True)


# -- marking tensors -------------------------------------------------------------------------------


def _xla_mark_sharding(tensor: torch.Tensor, sharding: Sharding) -> None:
    """Split ``tensor`` over the devices as ``sharding`` says, in place; see ``xs.mark_sharding``."""
    plain = marking.checked(unwrap_sharded_tensor(tensor))
    marking.apply_annotation(plain, annotation_by(sharding, tuple(plain.shape)))


def _xla_annotate_custom_sharding(tensor: torch.Tensor, sharding: Sharding) -> None:
    """Split only the current value of ``tensor``, in the program that uses it next."""
    plain = marking.checked(unwrap_sharded_tensor(tensor))
    marking.annotate_value(plain, annotation_by(sharding, tuple(plain.shape)).sharding)


def _xla_clear_sharding(tensor: torch.Tensor) -> None:
    """Remove the tensor's annotation; see ``clear_sharding``."""
    clear_sharding(tensor)


def _mark_manual_sharding(tensor: torch.Tensor, sharding: Sharding) -> None:
    """Mark ``tensor``, a pending result that was computed from parts of a tensor, as a part itself.

    Raises RuntimeError if ``sharding`` is not of type MANUAL, and if the tensor has a value already, is annotated,
    or was not computed from parts (XLA's partitioner would abort the process).
    """
    plain = marking.checked(unwrap_sharded_tensor(tensor))
    if sharding.type is not ShardingType.MANUAL:
        raise RuntimeError(MSG_NOT_MANUAL.format(text=sharding.text))
    storage = storage_of(plain)
    if not storage.trace.is_pending(storage) or not _is_computed_from_parts(plain):
        raise RuntimeError(MSG_DATA)
    current = sharding_of(plain)
    if current is not None:
        raise RuntimeError(MSG_ANNOTATED.format(text=current.text))
    _set_manual(plain)


def _is_computed_from_parts(tensor: XLATensor) -> bool:
    with graph_of([tensor]) as (_, entries, outputs):
        needed = operations_of(needed_entries(entries, outputs))
        return any(operation.plan.overload is TO_SHARD for operation in needed)


def _set_manual(tensor: XLATensor) -> None:
    count = len(runtime.client().devices())
    mesh = Mesh(list(range(count)), (count,))
    storage_of(tensor).annotate(Annotation(MANUAL, MANUAL.text, mesh, (None,) * tensor.dim()))


def _spmd_full_to_shard_shape(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a split tensor that each device holds. Each device then computes on its own part.

    Raises RuntimeError if the tensor is not split, or is manually sharded already.
    """
    plain = marking.checked(unwrap_sharded_tensor(tensor))
    sharding = sharding_of(plain)
    if sharding is None or sharding.type is ShardingType.MANUAL:
        raise RuntimeError(MSG_NO_SHARDING.format(text=sharding_text(plain)))
    part = to_part(plain, sharding.text)
    assert isinstance(part, XLATensor)
    _set_manual(part)
    return part


def _spmd_shard_to_full_shape(
    tensor: torch.Tensor, sharding: Sharding, output_shape: Sequence[int], output_dtype: torch.dtype
) -> torch.Tensor:
    """The whole tensor of ``output_shape``, split as ``sharding`` says, of which ``tensor`` is each device's part.

    Raises RuntimeError if the parts do not have the shape that follows, or not ``output_dtype``.
    """
    plain = marking.checked(unwrap_sharded_tensor(tensor))
    shape = tuple(output_shape)
    annotation = annotation_by(sharding, shape)
    part_shape = sharding.shard_shape(shape)
    if tuple(plain.shape) != part_shape or plain.dtype != output_dtype:
        text = MSG_WHOLE.format(
            wanted=part_shape, dtype=output_dtype, shape=shape, text=sharding.text,
            got=tuple(plain.shape), got_dtype=plain.dtype,
        )  # fmt: skip
        raise RuntimeError(text)
    whole = to_whole(plain, sharding.text, shape)
    assert isinstance(whole, XLATensor)
    storage_of(whole).annotate(annotation)
    return whole


# -- tensors from parts on the CPU -----------------------------------------------------------------


def _global_tensor_from_cpu_shards(
    shards: Sequence[torch.Tensor],
    sharding: Sharding,
    global_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """The tensor, split as ``sharding`` says, of which this process's devices have the parts ``shards``, in order.

    ``global_shape`` is needed if the tensor does not divide evenly (default: the shape that equal parts make up).
    Raises ValueError for a wrong number of shards, or for one with a wrong shape or dtype.
    """
    return assembled(shards, sharding, global_shape)


def _load_local_shards(
    tensor: torch.Tensor, shards: Sequence[torch.Tensor], devices: Sequence[str]
) -> None:
    """Replace the value of a split tensor by ``shards``, which are for the devices named ``devices`` (``CPU:3``).

    Raises ValueError unless the devices are those of this process and the parts fit.
    """
    plain = marking.checked(unwrap_sharded_tensor(tensor))
    own_devices = [shard.shard_device for shard in local_shards(plain)]
    by_device = dict(zip(devices, shards, strict=True))
    if sorted(by_device) != sorted(own_devices):
        raise ValueError(
            MSG_SHARD_DEVICES.format(got=sorted(by_device), wanted=sorted(own_devices))
        )
    load_local_shards_(plain, [XLAShard(by_device[name], ..., name, 0) for name in own_devices])


__all__ = [
    "OpSharding", "XlaShardingSpec", "_get_local_shard_replica_and_indices", "_get_local_shards",
    "_get_xla_op_sharding", "_get_xla_sharding_spec", "_get_xla_sharding_specs",
    "_get_xla_sharding_type", "_global_tensor_from_cpu_shards", "_load_local_shards",
    "_mark_manual_sharding", "_spmd_full_to_shard_shape", "_spmd_shard_to_full_shape",
    "_xla_annotate_custom_sharding", "_xla_clear_sharding", "_xla_get_auto_sharding",
    "_xla_mark_sharding", "_xla_set_auto_sharding", "_xla_spmd_all_reduce",
    "_xla_spmd_reduce_scatter",
]  # fmt: skip
