"""The collectives of ``xm``, which are recorded in the step and compiled with it.

With one replica, each returns the result for a group of one. They are not differentiable; those of
``torch_xla.core.functions`` are.

In all of them, ``groups`` is a list of lists of ordinals, in which each ordinal occurs once and all lists have one
length: each group runs the collective by itself (default: one group of all replicas). ``pin_layout``,
``channel_id`` and ``use_global_device_ids`` have no effect: torch_xla's callers pass them.
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
    "{name} takes tensors on an xla device, got one on {device}; move it to an xla device first"
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
    "{name}(channel_id={channel}): programs cannot transfer data between only two replicas; call "
    "xm.collective_permute(value, pairs) on all replicas"
)

# By device and pending step (by its epoch): the order of the collective that was recorded last, a scalar.
_orders: Final[dict[Trace, dict[int, torch.Tensor]]] = {}


def _trace(name: str, tensors: Sequence[torch.Tensor]) -> Trace:
    """The trace in which a collective of ``tensors`` is recorded.

    Raises ValueError if there are none, TypeError for a tensor that is not on an xla device.
    """
    if not tensors:
        raise ValueError(MSG_EMPTY.format(name=name))
    for tensor in tensors:
        if not isinstance(tensor, XLATensor):
            device = getattr(tensor, "device", type(tensor).__name__)
            raise TypeError(MSG_NOT_XLA.format(name=name, device=device))
    trace: Trace = storage_of(tensors[0]).trace
    return trace


def record(trace: Trace, name: str, tensors: Operand, *arguments: object) -> list[torch.Tensor]:
    """Record one collective, to run after all that were recorded before it on this device; returns its results.

    ``name`` and ``arguments`` are those of an operator of ``collective_ops``, without ``after``; ``tensors`` is one
    tensor or a list. Among threads of one process the collective is computed immediately.
    """
    team = team_of(trace.backend.replicas)
    if team is not None:
        return host_collectives.run(team, trace, name, tensors, arguments)
    with trace.lock, torch.no_grad():
        orders = _orders.get(trace, {})
        operator = getattr(operators, name)
        results = list(operator(tensors, *arguments, orders.get(trace.epoch)))
        # reports of collectives name the user's line; this finds it once per place in a step
        trace.cur.locate_here()
        # the orders of steps that have ended are dropped: only parked steps, of other threads, can go on
        orders = {e: after for e, after in orders.items() if e in trace.parked}
        _orders[trace] = {**orders, trace.epoch: results.pop()}
    return results


def order_of(trace: Trace) -> torch.Tensor | None:
    """The order of the collective that was recorded last in the calling thread's step; None without one."""
    with trace.lock:
        return _orders.get(trace, {}).get(trace.epoch)


def check_group_size(name: str, value: object, shard_count: int, groups: Groups) -> None:
    """Raise ValueError if ``shard_count`` is not the size of a group, as ``reduce_scatter`` does."""
    trace = _trace(name, _listed(value))
    _check_shards(name, "shard_count", shard_count, flat_groups(groups, world_of(trace))[1])


def world_of(trace: Trace) -> int:
    """The number of replicas that take part in a collective on this trace's device.

    Raises RuntimeError for a device that is not one of the job's replicas.
    """
    return runtime.replica_of(trace.device)[1]


def flat_groups(groups: Groups, world: int) -> tuple[list[int], int]:
    """The ordinals of all groups in one list, and the size of a group.

    Raises ValueError unless each of the ``world`` replicas is in exactly one group and all groups have one size.
    """
    nested = primitives.world(groups or (), world)
    return list(itertools.chain.from_iterable(nested)), len(nested[0])


def _check_kind(name: str, kind: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError for an unknown reduction, TypeError for a dtype that it does not support."""
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
    """The reductions of ``inputs`` over the replicas, by one collective, as new tensors.

    ``kind`` is one of ``REDUCTIONS``. Raises ValueError for another, TypeError for a dtype that it does not
    support.
    """
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
    """Reduce ``inputs`` over the replicas, and multiply the result by ``scale`` (default: 1).

    ``reduce_type`` is ``sum``, ``mul``, ``and``, ``or``, ``min`` or ``max``. ``inputs`` is one tensor, for which a
    new tensor is returned, or a list of tensors, which are reduced in place by one collective, and
    returned. Shapes and dtypes stay the same. ``and`` and ``or`` are bitwise, for integers and booleans; for
    booleans ``sum`` is ``or`` and ``mul`` is ``and``. Raises ValueError for an unknown
    reduction, TypeError for a dtype that it does not support and for tensors that are not on an xla device.
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
    """``result``, or ``output`` after its value has been copied into it. Raises ValueError for another shape."""
    if output is None:
        return result
    if output.shape != result.shape:
        raise ValueError(
            MSG_OUTPUT.format(name=name, got=tuple(output.shape), wanted=tuple(result.shape))
        )
    with torch.no_grad():
        return output.copy_(result)


def _positive(dim: int, tensor: torch.Tensor) -> int:
    """``dim`` counted from the front. Raises IndexError if ``tensor`` has no such dimension."""
    size = tensor.dim()
    if not -size <= dim < size:
        raise IndexError(MSG_DIMENSION.format(low=-size, high=size - 1, got=dim))
    return dim % size


def _listed(value: Operand) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _lists(
    name: str, value: object, output: Operand
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors and their outputs as lists. Raises ValueError if the lists differ in length."""
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
    """The values of all replicas of the group, concatenated along ``dim`` (default: 0).

    ``value`` is a tensor, or a list of tensors, for which a list is returned. ``output`` is a tensor, or a list of
    tensors, into which the results are copied, and which is returned (default: None, new tensors). Raises
    IndexError if there is no such dimension, ValueError for an output of another shape.
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
    """This replica's slice along ``scatter_dim`` of the reduction, multiplied by ``scale``.

    ``reduce_type`` is that of ``all_reduce``, and ``shard_count`` the size of a group. ``input`` is a tensor, or a
    list of tensors, for which a list is returned. ``output`` is as in ``all_gather``. Raises
    ValueError if the dimension cannot be split evenly, or for another ``shard_count``; IndexError if there is no
    such dimension; TypeError for a dtype that the reduction does not support.
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
    """Send slice i along ``split_dimension`` to the group's replica i; returns the received slices.

    They are concatenated along ``concat_dimension``, in the order of the replicas that they come from.
    ``split_count`` is the size of a group; raises ValueError otherwise, or if the dimension cannot be split evenly.
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
    """The ``value`` of the replica that sends to this one, by ``pairs`` of (source, target) ordinals.

    Zeros of the same shape if no pair has this replica as its target. Raises ValueError for an ordinal that does
    not exist, or that is the source or the target of two pairs.
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
    """Copy the values of ``tensors`` on replica ``root_ordinal`` (default: 0) to the other replicas, in place.

    With ``groups`` only the tensors of the root's group change. Raises ValueError for an ordinal that does not
    exist.
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
    """New tensors with the values of replica ``root``; see ``collective_broadcast``."""
    trace = _trace("collective_broadcast", tensors)
    world = world_of(trace)
    if not 0 <= root < world:
        raise ValueError(f"collective_broadcast: there is no ordinal {root} among {world} replicas")
    if world == 1:
        return [x.detach().clone() for x in tensors]
    return record(trace, "broadcast", list(tensors), root, *flat_groups(groups, world))


def send(value: torch.Tensor, channel_id: int) -> None:
    """Not supported: raises NotImplementedError, which names ``collective_permute``."""
    raise NotImplementedError(MSG_ONE_SIDED.format(name="send", channel=channel_id))


def recv(output: torch.Tensor, channel_id: int) -> None:
    """Not supported: raises NotImplementedError, which names ``collective_permute``."""
    raise NotImplementedError(MSG_ONE_SIDED.format(name="recv", channel=channel_id))
