"""The collectives of replicas that are threads of one process, computed on the host.

A program over several devices of one process runs on all of them in one call, so all threads would have to record
exactly the same step, including values that only uncollected garbage still holds. Instead, the threads
exchange the operands of each collective, and each device runs its own programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final

import torch

from xla_core.extension_api.operators import Operand
from xla_core.extension_api.steps import Trace
from xla_core.extension_api.tensors import read, upload
from xla_dist.processes.thread_replicas import Team

# For each replica, in the order of the ordinals, a list of tensors.
Values = list[list[torch.Tensor]]

_COMBINE: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "sum": torch.add,
    "mul": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
}


def _nested(flat: Sequence[int], size: int) -> list[list[int]]:
    return [list(flat[i : i + size]) for i in range(0, len(flat), size)]


def _in_groups(
    values: Values,
    flat: Sequence[int],
    size: int,
    function: Callable[[list[torch.Tensor], int], torch.Tensor],
) -> Values:
    """Call ``function(tensors of the group, place in the group)`` for each tensor of each replica.

    ``flat`` lists the replicas of all groups, ``size`` in each.
    """
    results: Values = [[] for _ in values]
    for group in _nested(flat, size):
        for i in range(len(values[0])):
            tensors = [values[r][i] for r in group]
            for place, r in enumerate(group):
                results[r].append(function(tensors, place))
    return results


def _reduce(kind: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    combine = _COMBINE[kind]
    if tensors[0].dtype == torch.bool:
        combine = torch.logical_or if kind in ("sum", "max", "or") else torch.logical_and
    return functools.reduce(combine, tensors)


def _all_reduce(values: Values, kind: str, flat: Sequence[int], size: int) -> Values:
    return _in_groups(values, flat, size, lambda tensors, _: _reduce(kind, tensors))


def _all_gather(values: Values, dim: int, flat: Sequence[int], size: int) -> Values:
    return _in_groups(values, flat, size, lambda tensors, _: torch.cat(tensors, dim))


def _reduce_scatter(values: Values, kind: str, dim: int, flat: Sequence[int], size: int) -> Values:
    return _in_groups(
        values, flat, size, lambda tensors, place: _reduce(kind, tensors).chunk(size, dim)[place]
    )


def _all_to_all(values: Values, split: int, concat: int, flat: Sequence[int], size: int) -> Values:
    return _in_groups(
        values,
        flat,
        size,
        lambda tensors, place: torch.cat([t.chunk(size, split)[place] for t in tensors], concat),
    )


def _broadcast(values: Values, root: int, flat: Sequence[int], size: int) -> Values:
    group = next(g for g in _nested(flat, size) if root in g)
    return [values[root] if r in group else own for r, own in enumerate(values)]


def _collective_permute(values: Values, flat: Sequence[int]) -> Values:
    source = {target: origin for origin, target in _nested(flat, 2)}
    return [
        [values[source[r]][0] if r in source else torch.zeros_like(own[0])]
        for r, own in enumerate(values)
    ]


_COLLECTIVES: Final[dict[str, Callable[..., Values]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "collective_permute": _collective_permute,
}


def compute(name: str, values: Values, arguments: Sequence[Operand]) -> Values:
    """The results of each replica for the collective ``name``.

    ``arguments`` are those of the operator in ``collective_ops``, without ``after``.
    """
    return _COLLECTIVES[name](values, *arguments)


def run(
    team: Team, trace: Trace, name: str, tensors: Operand, arguments: Sequence[Operand]
) -> list[torch.Tensor]:
    """Compute one collective among the threads of ``team``; returns this thread's results, on its device.

    Runs the pending operations that ``tensors`` (one, or a list) depend on, and waits for the other threads. Raises
    RuntimeError if they run another collective, or do not arrive.
    """
    inputs = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    values = [read(x) for x in inputs]
    shapes = ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in values)
    what = f"{name} {' '.join(map(str, arguments))} of {shapes}"
    function = functools.partial(compute, name, arguments=arguments)
    ordinal = team.devices.index(trace.backend.placement.devices[0])
    results: Values = team.exchange(ordinal, what, values, function)
    return [upload(x.contiguous(), trace) for x in results[ordinal]]
