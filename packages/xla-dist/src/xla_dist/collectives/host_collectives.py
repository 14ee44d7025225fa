"""The collectives of replicas that are threads of one process: computed on the host.

A program over several devices of one process runs on all of them in one call, so every thread would
have to record the very same step, down to which values its garbage still holds. Threads meet at the
collective instead, with the values that it takes; the programs stay each device's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from xla_core.extension_api.operators import Operand
from xla_core.extension_api.steps import Trace
from xla_core.extension_api.tensors import read, upload
from xla_dist.processes.thread_replicas import Team

# One entry per replica, in ordinal order; each a list of tensors.
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
    values: Values, flat: Sequence[int], size: int, function: Callable[[list[Any], int], Any]
) -> Values:
    """``function(the group's tensors, a replica's place in it)`` for every tensor and replica."""
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


def _all_reduce(values: Values, kind: str, flat: Any, size: int) -> Values:
    return _in_groups(values, flat, size, lambda tensors, _: _reduce(kind, tensors))


def _all_gather(values: Values, dim: int, flat: Any, size: int) -> Values:
    return _in_groups(values, flat, size, lambda tensors, _: torch.cat(tensors, dim))


def _reduce_scatter(values: Values, kind: str, dim: int, flat: Any, size: int) -> Values:
    return _in_groups(
        values, flat, size, lambda tensors, place: _reduce(kind, tensors).chunk(size, dim)[place]
    )


def _all_to_all(values: Values, split: int, concat: int, flat: Any, size: int) -> Values:
    return _in_groups(
        values,
        flat,
        size,
        lambda tensors, place: torch.cat([t.chunk(size, split)[place] for t in tensors], concat),
    )


def _broadcast(values: Values, root: int, flat: Any, size: int) -> Values:
    group = next(g for g in _nested(flat, size) if root in g)
    return [values[root] if r in group else own for r, own in enumerate(values)]


def _collective_permute(values: Values, flat: Any) -> Values:
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
    """What each replica gets of the collective ``name``; the last arguments are the groups."""
    return _COLLECTIVES[name](values, *arguments)


def run(
    team: Team, trace: Trace, name: str, tensors: Operand, arguments: Sequence[Operand]
) -> list[torch.Tensor]:
    """One collective among threads; runs what ``tensors`` need and waits for the other threads."""
    inputs = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    given = [read(x) for x in inputs]
    shapes = ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in given)
    what = f"{name} {' '.join(map(str, arguments))} of {shapes}"
    function = functools.partial(compute, name, arguments=arguments)
    ordinal = team.devices.index(trace.backend.placement.devices[0])
    results: Values = team.meet(ordinal, what, given, function)
    return [upload(x.contiguous(), trace) for x in results[ordinal]]
