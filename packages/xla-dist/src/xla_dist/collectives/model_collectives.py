"""``xm``'s collectives: recorded in the graph and compiled with the step.

With one replica each gives what a group of one gives. None of them is differentiated: those of
``torch_xla.core.functions`` are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import torch

from xla_core.extension_api import runtime
from xla_core.extension_api.operators import Operand
from xla_core.extension_api.steps import Trace
from xla_core.extension_api.tensors import XLATensor, storage_of
from xla_dist.collectives import host_collectives
from xla_dist.operators import primitives
from xla_dist.operators.collective_ops import REDUCTIONS, operators
from xla_dist.processes.thread_replicas import team_of

REDUCE_SUM: Final = "sum"
REDUCE_MUL: Final = "mul"
REDUCE_AND: Final = "and"
REDUCE_OR: Final = "or"
REDUCE_MIN: Final = "min"
REDUCE_MAX: Final = "max"

Groups = Sequence[Sequence[int]] | None

MSG_NOT_XLA: Final = (
    "{name} takes tensors on an xla device, got one on {device}; move it there first"
)
MSG_DIMENSION: Final = (
    "Dimension out of range (expected to be in range of [{low}, {high}], but got {got})"
)
MSG_EMPTY: Final = "{name} got no tensor"
MSG_OUTPUT: Final = "{name}: output has shape {got}, the result has {wanted}"
MSG_SHARDS: Final = "{name}: {argument}={got}, but the groups have {wanted} replicas each"
MSG_REDUCTION: Final = "{name}: the reduction {kind!r} is not one of {known}"
MSG_DTYPE: Final = "{name}: there is no reduction {kind!r} of {dtype}"
MSG_ONE_SIDED: Final = (
    "{name}(channel_id={channel}): programs have no one-sided transfers; let all replicas call "
    "xm.collective_permute(value, pairs)"
)

# The order of the collectives recorded last, by device and pending step (its epoch): a scalar.
_orders: Final[dict[Trace, dict[int, torch.Tensor]]] = {}


def _trace(name: str, tensors: Sequence[torch.Tensor]) -> Trace:
    """The trace that a collective of ``tensors`` is recorded in. Raises TypeError or ValueError."""
    if not tensors:
        raise ValueError(MSG_EMPTY.format(name=name))
    for tensor in tensors:
        if not isinstance(tensor, XLATensor):
            where = getattr(tensor, "device", type(tensor).__name__)
            raise TypeError(MSG_NOT_XLA.format(name=name, device=where))
    trace: Trace = storage_of(tensors[0]).trace
    return trace


def record(trace: Trace, name: str, tensors: Operand, *arguments: object) -> list[torch.Tensor]:
    """Record one collective after all that were recorded before it on this device.

    Between threads of one process it is computed at once.
    """
    team = team_of(trace.backend.replicas)
    if team is not None:
        return host_collectives.run(team, trace, name, tensors, arguments)
    with trace.lock, torch.no_grad():
        orders = _orders.get(trace, {})
        operator = getattr(operators, name)
        results = list(operator(tensors, *arguments, orders.get(trace.epoch)))
        trace.cur.locate_here()  # once per place in a step: reports name the line
        orders = {e: after for e, after in orders.items() if e in trace.parked}
        _orders[trace] = {**orders, trace.epoch: results.pop()}
    return results


def order_of(trace: Trace) -> torch.Tensor | None:
    """The mark of the collective recorded last in the calling thread's step; None: there is none."""
    with trace.lock:
        return _orders.get(trace, {}).get(trace.epoch)


def check_group_size(name: str, value: object, shard_count: int, groups: Groups) -> None:
    """Raises ValueError where ``shard_count`` is not the size of a group, as ``reduce_scatter`` does."""
    trace = _trace(name, _listed(value))
    _check_shards(name, "shard_count", shard_count, flat_groups(groups, world_of(trace))[1])


def world_of(trace: Trace) -> int:
    """The number of replicas a collective on this device talks to.

    Raises RuntimeError for a device that is not one of the job's replicas.
    """
    return runtime.replica_of(trace.device)[1]


def flat_groups(groups: Groups, world: int) -> tuple[list[int], int]:
    """Replica groups one after the other, and the size of one.

    Raises ValueError unless every replica is in exactly one group and all are of one size.
    """
    nested = primitives.world(groups or (), world)
    return list(itertools.chain.from_iterable(nested)), len(nested[0])


def _check_kind(name: str, kind: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raises ValueError for an unknown reduction, TypeError for a dtype that it does not take."""
    if kind not in REDUCTIONS:
        known = ", ".join(REDUCTIONS)
        raise ValueError(MSG_REDUCTION.format(name=name, kind=kind, known=known))
    for tensor in tensors:
        bitwise = kind in ("and", "or") and (tensor.is_floating_point() or tensor.is_complex())
        if bitwise or (kind in ("min", "max") and tensor.is_complex()):
            raise TypeError(MSG_DTYPE.format(name=name, kind=kind, dtype=tensor.dtype))


def reduced(
    kind: str, inputs: Sequence[torch.Tensor], groups: Groups = None
) -> list[torch.Tensor]:  # fmt: skip
    """New tensors with ``inputs`` reduced over the replicas, by one collective."""
    trace = _trace("all_reduce", inputs)
    _check_kind("all_reduce", kind, inputs)
    world = world_of(trace)
    if world == 1:
        return [x.detach().clone() for x in inputs]
    return record(trace, "all_reduce", list(inputs), kind, *flat_groups(groups, world))


def all_reduce(
    reduce_type: str,
    inputs: torch.Tensor | Sequence[torch.Tensor],
    scale: float = 1.0,
    groups: Groups = None,
    pin_layout: bool = True,
) -> Operand:
    """``inputs`` reduced over the replicas (``sum, mul, and, or, min, max``), then times ``scale``.

    A tensor gives a new tensor. A list of tensors is reduced in place, by one collective, and
    returned. ``groups`` is a list of lists of ordinals, each ordinal in one of them: every group
    reduces by itself. ``pin_layout`` is accepted for torch_xla's sake. ``and`` and ``or`` are bitwise, for
    integers and booleans; booleans take ``sum`` as or, ``mul`` as and.
    """
    del pin_layout
    if isinstance(inputs, torch.Tensor):
        (result,) = reduced(reduce_type, [inputs], groups)
        return result if scale == 1.0 else _scaled(result, scale)
    if not inputs:
        return inputs
    results = reduced(reduce_type, inputs, groups)
    with torch.no_grad():
        for target, result in zip(inputs, _all_scaled(results, scale), strict=True):
            target.copy_(result)
    return inputs


def _all_scaled(tensors: list[torch.Tensor], scale: float) -> Sequence[torch.Tensor]:
    if scale == 1.0:
        return tensors
    if all(t.is_floating_point() for t in tensors):
        return torch._foreach_mul(tensors, scale)
    return [_scaled(t, scale) for t in tensors]


def _scaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return (tensor * scale).to(tensor.dtype)


def _stored(name: str, output: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    """``result``, or ``output`` with its value."""
    if output is None:
        return result
    if output.shape != result.shape:
        raise ValueError(
            MSG_OUTPUT.format(name=name, got=tuple(output.shape), wanted=tuple(result.shape))
        )
    with torch.no_grad():
        return output.copy_(result)


def _positive(dim: int, tensor: torch.Tensor) -> int:
    """A dimension counted from the front. Raises IndexError for one that is not there, in any world."""
    size = tensor.dim()
    if not -size <= dim < size:
        raise IndexError(MSG_DIMENSION.format(low=-size, high=size - 1, got=dim))
    return dim % size


def _listed(value: Operand) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _lists(
    name: str, value: object, output: Operand
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    values = _listed(value)
    outputs = [None] * len(values) if output is None else _listed(output)
    if len(outputs) != len(values):
        raise ValueError(f"{name}: {len(values)} tensors and {len(outputs)} outputs")
    return values, outputs


def all_gather(
    value: torch.Tensor | Sequence[torch.Tensor],
    dim: int = 0,
    groups: Groups = None,
    output: Operand = None,
    pin_layout: bool = True,
    channel_id: int | None = None,
    use_global_device_ids: bool | None = None,
) -> Operand:
    """The values of all replicas of the group side by side along ``dim``.

    A list gives a list, gathered one by one in one operator. ``output`` takes the result in place.
    The last three are accepted for torch_xla's sake.
    """
    del pin_layout, channel_id, use_global_device_ids
    values, outputs = _lists("all_gather", value, output)
    trace = _trace("all_gather", values)
    world = world_of(trace)
    dim = _positive(dim, values[0])
    if world == 1:
        results = [x.detach().clone() for x in values]
    else:
        results = record(trace, "all_gather", values, dim, *flat_groups(groups, world))
    stored = [_stored("all_gather", o, r) for o, r in zip(outputs, results, strict=True)]
    return stored[0] if isinstance(value, torch.Tensor) else stored


def reduce_scatter(
    reduce_type: str,
    input: torch.Tensor | Sequence[torch.Tensor],
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: Operand = None,
    pin_layout: bool = True,
    channel_id: int | None = None,
    use_global_device_ids: bool | None = None,
) -> Operand:
    """This replica's slice along ``scatter_dim`` of the reduction, times ``scale``.

    ``shard_count`` is the size of a group. A list gives a list. Raises ValueError where the
    dimension cannot be split evenly.
    """
    del pin_layout, channel_id, use_global_device_ids
    values, outputs = _lists("reduce_scatter", input, output)
    trace = _trace("reduce_scatter", values)
    _check_kind("reduce_scatter", reduce_type, values)
    flat, size = flat_groups(groups, world_of(trace))
    _check_shards("reduce_scatter", "shard_count", shard_count, size)
    dim = _positive(scatter_dim, values[0])
    if size == 1:
        results = [x.detach().clone() for x in values]
    else:
        results = record(trace, "reduce_scatter", values, reduce_type, dim, flat, size)
    results = [r if scale == 1.0 else _scaled(r, scale) for r in results]
    stored = [_stored("reduce_scatter", o, r) for o, r in zip(outputs, results, strict=True)]
    return stored[0] if isinstance(input, torch.Tensor) else stored


def _check_shards(name: str, argument: str, got: int, wanted: int) -> None:
    if got != wanted:
        raise ValueError(MSG_SHARDS.format(name=name, argument=argument, got=got, wanted=wanted))


def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Slice i along ``split_dimension`` goes to the group's replica i; what comes is concatenated.

    ``split_count`` is the size of a group.
    """
    del pin_layout
    trace = _trace("all_to_all", [value])
    flat, size = flat_groups(groups, world_of(trace))
    _check_shards("all_to_all", "split_count", split_count, size)
    dims = (_positive(split_dimension, value), _positive(concat_dimension, value))
    if size == 1:
        return value.detach().clone()
    (result,) = record(trace, "all_to_all", value, *dims, flat, size)
    return result


def collective_permute(value: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    """The value of the replica that sends to this one, after ``pairs`` of (source, target) ordinals.

    Zeros where no pair has this replica as its target. Raises ValueError when an ordinal is not
    there, sends twice or is sent to twice.
    """
    trace = _trace("collective_permute", [value])
    world = world_of(trace)
    for side in zip(*pairs, strict=True) if pairs else ():
        if len(set(side)) != len(side) or not all(0 <= int(r) < world for r in side):
            raise ValueError(
                f"collective_permute: pairs={[list(p) for p in pairs]}: every ordinal from 0 to "
                f"{world - 1} sends at most once and is sent to at most once"
            )
    flat = [int(r) for pair in pairs for r in pair]
    if world == 1:
        return value.detach().clone() if flat else torch.zeros_like(value)
    (result,) = record(trace, "collective_permute", value, flat)
    return result


def collective_broadcast(
    tensors: Sequence[torch.Tensor],
    root_ordinal: int = 0,
    groups: Groups = None,
    pin_layout: bool = True,
) -> None:
    """Give ``tensors``, in place, the values they have on replica ``root_ordinal``.

    With ``groups`` only those in the root's group change. Raises ValueError for an ordinal that is
    not there.
    """
    del pin_layout
    tensors = list(tensors)
    if not tensors:
        return
    results = broadcast(tensors, root_ordinal, groups)
    with torch.no_grad():
        for target, result in zip(tensors, results, strict=True):
            target.copy_(result)


def broadcast(
    tensors: Sequence[torch.Tensor], root: int, groups: Groups = None
) -> list[torch.Tensor]:
    """New tensors with replica ``root``'s values; see ``collective_broadcast``."""
    trace = _trace("collective_broadcast", tensors)
    world = world_of(trace)
    if not 0 <= root < world:
        raise ValueError(f"collective_broadcast: there is no ordinal {root} among {world} replicas")
    if world == 1:
        return [x.detach().clone() for x in tensors]
    return record(trace, "broadcast", list(tensors), root, *flat_groups(groups, world))


def send(value: torch.Tensor, channel_id: int) -> None:
    """Not here: raises NotImplementedError that names ``collective_permute``."""
    raise NotImplementedError(MSG_ONE_SIDED.format(name="send", channel=channel_id))


def recv(output: torch.Tensor, channel_id: int) -> None:
    """Not here: raises NotImplementedError that names ``collective_permute``."""
    raise NotImplementedError(MSG_ONE_SIDED.format(name="recv", channel=channel_id))
