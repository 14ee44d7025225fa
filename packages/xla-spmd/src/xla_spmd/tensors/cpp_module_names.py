"""The functions of torch_xla's C++ module ``_XLAC`` about shardings, on plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, Final

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
    "Marking any data tensors as manual is not supported, nor results of them: it has to be a pending result of "
    "parts, which xs.enable_manual_sharding(t, partition_spec) gives"
)
MSG_NO_SHARDING: Final = (
    "_spmd_full_to_shard_shape takes a tensor that is split, as xs.mark_sharding does, and not by hand "
    "already; its sharding is {text!r}"
)
MSG_WHOLE: Final = (
    "_spmd_shard_to_full_shape takes parts of shape {wanted} and dtype {dtype} for a tensor of shape "
    "{shape} split as {text}, got {got} and {got_dtype}"
)
MSG_SHARD_DEVICES: Final = "_load_local_shards: shards for {got}, this process has {wanted}"


class XlaShardingSpec:
    """How a CPU tensor is split when it goes to the devices; made of ``OpSharding``'s lists.

    With ``minibatch`` each process brings rows of its own: dimension 0 of the global tensor is that of all
    processes' together.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        tile_assignment: Sequence[Any],
        group_assignment: Sequence[Any],
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
        """A CPU tensor as one on ``device``, split so."""
        annotation = annotation_by(self.sharding, self.global_shape)
        if self.minibatch:
            return ShardingSpec(annotation.mesh, annotation.spec, True).send(tensor, device)
        sent = tensor.to(device)
        marking.lay_as(sent, annotation)
        return sent


# -- what is told ----------------------------------------------------------------------------------


def _get_xla_sharding_spec(tensor: torch.Tensor) -> str:
    """The tensor's HLO sharding, or an empty text where it has none."""
    return sharding_text(unwrap_sharded_tensor(tensor))


def _get_xla_sharding_specs(tensors: Sequence[torch.Tensor]) -> list[str]:
    """``_get_xla_sharding_spec`` of each tensor."""
    return [_get_xla_sharding_spec(t) for t in tensors]


def _get_xla_sharding_type(tensor: torch.Tensor) -> int | None:
    """The number of the tensor's ``ShardingType``, or None where it has no sharding."""
    kind = sharding_type(unwrap_sharded_tensor(tensor))
    return None if kind is None else int(kind)


def _get_xla_op_sharding(tensor: torch.Tensor) -> Sharding | None:
    """The tensor's sharding, or None where it has none."""
    return sharding_of(unwrap_sharded_tensor(tensor))


def _get_local_shards(tensors: Sequence[torch.Tensor]) -> list[list[tuple[torch.Tensor, str]]]:
    """Per tensor, the parts that this process holds and the names of their devices."""
    by_tensor = [local_shards(unwrap_sharded_tensor(t)) for t in tensors]
    return [[(shard.data, shard.shard_device) for shard in shards] for shards in by_tensor]


def _get_local_shard_replica_and_indices(
    tensors: Sequence[Operand],
) -> list[list[tuple[int, Sequence[slice] | EllipsisType]]]:
    """Per tensor and part, the copy's number and where the part belongs."""
    by_tensor = [shard_indices(unwrap_sharded_tensor(t)) for t in tensors]
    return [[(copy, listed(indices)) for _, indices, copy in parts] for parts in by_tensor]


def _xla_get_auto_sharding() -> bool:
    """Whether steps decide how their inputs are split: ``xr.use_spmd(auto=True)``."""
    return mode.is_automatic()


def _xla_set_auto_sharding() -> None:
    """``xr.use_spmd(auto=True)``."""
    mode.use_spmd(auto=True)


# -- what is marked --------------------------------------------------------------------------------


def _xla_mark_sharding(tensor: torch.Tensor, sharding: Sharding) -> None:
    """Split a tensor over the devices as ``sharding`` says, in place; see ``xs.mark_sharding``."""
    plain = marking.checked(unwrap_sharded_tensor(tensor))
    marking.lay_as(plain, annotation_by(sharding, tuple(plain.shape)))


def _xla_annotate_custom_sharding(tensor: torch.Tensor, sharding: Sharding) -> None:
    """Split a tensor's current value in the program that uses it next; what is written later is free."""
    plain = marking.checked(unwrap_sharded_tensor(tensor))
    marking.lay_value(plain, annotation_by(sharding, tuple(plain.shape)).sharding)


def _xla_clear_sharding(tensor: torch.Tensor) -> None:
    """``clear_sharding``."""
    clear_sharding(tensor)


def _mark_manual_sharding(tensor: torch.Tensor, sharding: Sharding) -> None:
    """Say that a pending result, computed from parts of a tensor, is a part itself.

    Raises RuntimeError for another sharding than MANUAL, and a tensor that has a value, is annotated, or is
    not computed from parts (XLA's partitioner would end the process).
    """
    plain = marking.checked(unwrap_sharded_tensor(tensor))
    if sharding.type is not ShardingType.MANUAL:
        raise RuntimeError(MSG_NOT_MANUAL.format(text=sharding.text))
    storage = storage_of(plain)
    if not storage.trace.is_pending(storage) or not _is_of_parts(plain):
        raise RuntimeError(MSG_DATA)
    present = sharding_of(plain)
    if present is not None:
        raise RuntimeError(MSG_ANNOTATED.format(text=present.text))
    _set_manual(plain)


def _is_of_parts(tensor: XLATensor) -> bool:
    with graph_of([tensor]) as (_, entries, outputs):
        needed = operations_of(needed_entries(entries, outputs))
        return any(operation.plan.overload is TO_SHARD for operation in needed)


def _set_manual(tensor: XLATensor) -> None:
    count = len(runtime.client().devices())
    mesh = Mesh(list(range(count)), (count,))
    storage_of(tensor).annotate(Annotation(MANUAL, MANUAL.text, mesh, (None,) * tensor.dim()))


def _spmd_full_to_shard_shape(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a split tensor that each device holds; operators on it run on every device by itself.

    Raises RuntimeError for a tensor that is not split, or by hand already.
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
    """The whole tensor of ``output_shape`` whose parts ``tensor`` is, split as ``sharding`` says.

    Raises RuntimeError for parts of another shape or dtype.
    """
    plain = marking.checked(unwrap_sharded_tensor(tensor))
    shape = tuple(output_shape)
    annotation = annotation_by(sharding, shape)
    wanted = sharding.shard_shape(shape)
    if tuple(plain.shape) != wanted or plain.dtype != output_dtype:
        text = MSG_WHOLE.format(
            wanted=wanted, dtype=output_dtype, shape=shape, text=sharding.text,
            got=tuple(plain.shape), got_dtype=plain.dtype,
        )  # fmt: skip
        raise RuntimeError(text)
    whole = to_whole(plain, sharding.text, shape)
    assert isinstance(whole, XLATensor)
    storage_of(whole).annotate(annotation)
    return whole


# -- parts from the CPU ----------------------------------------------------------------------------


def _global_tensor_from_cpu_shards(
    shards: Sequence[torch.Tensor],
    sharding: Sharding,
    global_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """A tensor made of the parts of this process's devices, in their order, split as ``sharding`` says.

    ``global_shape`` is needed where the tensor does not divide evenly. Raises what ``assembled`` raises.
    """
    return assembled(shards, sharding, global_shape)


def _load_local_shards(
    tensor: torch.Tensor, shards: Sequence[torch.Tensor], devices: Sequence[str]
) -> None:
    """Replace the value of a split tensor by parts for the devices with these names (``CPU:3``).

    Raises ValueError for other devices than this process's, or parts that do not fit.
    """
    plain = marking.checked(unwrap_sharded_tensor(tensor))
    wanted = [shard.shard_device for shard in local_shards(plain)]
    given = dict(zip(devices, shards, strict=True))
    if sorted(given) != sorted(wanted):
        raise ValueError(MSG_SHARD_DEVICES.format(got=sorted(given), wanted=sorted(wanted)))
    load_local_shards_(plain, [XLAShard(given[name], ..., name, 0) for name in wanted])


__all__ = [
    "OpSharding", "XlaShardingSpec", "_get_local_shard_replica_and_indices", "_get_local_shards",
    "_get_xla_op_sharding", "_get_xla_sharding_spec", "_get_xla_sharding_specs",
    "_get_xla_sharding_type", "_global_tensor_from_cpu_shards", "_load_local_shards",
    "_mark_manual_sharding", "_spmd_full_to_shard_shape", "_spmd_shard_to_full_shape",
    "_xla_annotate_custom_sharding", "_xla_clear_sharding", "_xla_get_auto_sharding",
    "_xla_mark_sharding", "_xla_set_auto_sharding", "_xla_spmd_all_reduce",
    "_xla_spmd_reduce_scatter",
]  # fmt: skip
