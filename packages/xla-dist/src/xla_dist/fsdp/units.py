"""What a sharded module records in a step: gather, free after the forward pass, gather again, reduce.

Nothing here runs at once. A full parameter is a value in the step's program; how long the program keeps it
in memory follows from where it is used. For the backward pass, PyTorch saves tensors that look at the
storage of a gathered parameter. Where memory is to be saved, that storage's value is taken away after the
forward pass, and when the module's backward pass begins it gets the value of a second gather, which an
optimization barrier keeps from being merged with the first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from xla_core.extension_api import autograd, operators
from xla_core.extension_api.operators import Gradients, Tree
from xla_core.extension_api.tensors import (
    NoValueError,
    XLATensor,
    collect,
    map_selected,
    restore_value,
    revoke,
)
from xla_dist.collectives import model_collectives
from xla_dist.collectives.model_collectives import Groups
from xla_dist.fsdp.layouts import Layout

MSG_FREED: Final = (
    "the full parameter {name} was freed after the forward pass of its sharded module, and nothing that the "
    "module returned brought it back in the backward pass; return tensors, or lists, dicts or "
    "dataclasses of them, or use reshard_after_forward=False"
)


@dataclasses.dataclass(frozen=True)
class Place:
    """An attribute of a module that is a full parameter, or from ``start`` on a piece of a flat one."""

    module: nn.Module
    attribute: str
    size: torch.Size
    start: int | None = None

    def put(self, full: torch.Tensor) -> None:
        """Give the module its parameter, a view of ``full``."""
        if self.start is not None:
            full = full[self.start : self.start + self.size.numel()].view(self.size)
        setattr(self.module, self.attribute, full)

    def clear(self) -> None:
        """Leave a tensor without a value: it has a shape, and says so when it is computed with."""
        setattr(self.module, self.attribute, self._shape_only)

    @functools.cached_property
    def _shape_only(self) -> torch.Tensor:
        return torch.empty(self.size, device="meta")


@dataclasses.dataclass(frozen=True)
class Shard:
    """One sharded parameter: this replica's part, how it was cut, its name and where it is used."""

    parameter: nn.Parameter
    layout: Layout
    path: str
    places: tuple[Place, ...]

    @property
    def trains(self) -> bool:
        """Whether it gets gradients."""
        return self.parameter.requires_grad


@dataclasses.dataclass
class Options:
    """How a unit gathers and reduces; see ``XlaFullyShardedDataParallel``."""

    compute_dtype: torch.dtype
    groups: Groups
    world: int
    coalesce: bool
    bucket_bytes: int
    barrier_in_forward: bool
    barrier_in_backward: bool
    float32_reduction: bool
    predivide: float
    postdivide: float
    scale: float = 1.0


class Unit:
    """The parameters that are gathered together, and whether their gradients are reduced now."""

    def __init__(self, shards: Sequence[Shard], options: Options) -> None:
        self.shards = list(shards)
        self.options = options
        self.reduces = True
        # full gradients of backward passes that reduced nothing, by position
        self.unreduced: dict[int, torch.Tensor] = {}
        self.clear()

    def clear(self) -> None:
        """Take the full parameters from the modules."""
        for shard in self.shards:
            for place in shard.places:
                place.clear()

    def put(self, fulls: Sequence[torch.Tensor]) -> None:
        """Give the modules their full parameters."""
        for shard, full in zip(self.shards, fulls, strict=True):
            for place in shard.places:
                place.put(full)

    def gathered(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The padded full parameters of all replicas' ``parts``."""
        options = self.options
        parts = [p.to(options.compute_dtype) for p in parts]
        if options.coalesce and parts:
            coalesced: list[torch.Tensor] = model_collectives.all_gather(parts, 0, options.groups)
            return coalesced
        return [model_collectives.all_gather(p, 0, options.groups) for p in parts]

    def buckets(self) -> Iterator[list[int]]:
        """Positions of parameters whose gradients are reduced by one operator, the last ones first."""
        bucket: list[int] = []
        size = 0
        for position in reversed(range(len(self.shards))):
            if not self.shards[position].trains:
                continue
            bucket.append(position)
            size += self.shards[position].layout.size.numel() * self.options.compute_dtype.itemsize
            if size > self.options.bucket_bytes:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket

    def reduced(
        self, positions: Sequence[int], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The parts' gradients from full ones; None where there is none, or is none yet."""
        summed = {p: self._with_earlier(p, g) for p, g in zip(positions, gradients, strict=True)}
        ready = {p: g for p, g in summed.items() if g is not None}
        if not self.reduces:
            self.unreduced |= ready
            return [None] * len(positions)
        if not ready:
            return [None] * len(positions)
        options = self.options
        prepared = [self._prepared(p, g) for p, g in ready.items()]
        results = model_collectives.reduce_scatter(
            model_collectives.REDUCE_SUM, prepared, options.scale, 0, options.world, options.groups
        )
        done = dict(zip(ready, map(self._finished, ready, results), strict=True))
        return [done.get(p) for p in positions]

    def _with_earlier(self, position: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        earlier = self.unreduced.pop(position, None)
        if gradient is None or earlier is None:
            return earlier if gradient is None else gradient
        return earlier + gradient

    def _prepared(self, position: int, gradient: torch.Tensor) -> torch.Tensor:
        if self.options.float32_reduction:
            gradient = gradient.float()
        if self.options.predivide != 1:
            gradient = gradient / self.options.predivide
        return self.shards[position].layout.padded(gradient)

    def _finished(self, position: int, part: torch.Tensor) -> torch.Tensor:
        part = part.to(self.shards[position].parameter.dtype)
        return part / self.options.postdivide if self.options.postdivide != 1 else part


class Call:
    """One forward pass of a unit, and its backward pass."""

    def __init__(self, unit: Unit, frees: bool, finish: Callable[[], None]) -> None:
        self.unit = unit
        self.frees = frees
        self.finish = finish
        self.bases: list[torch.Tensor] = []
        self.fulls: list[torch.Tensor] = []
        self.freed = False

    # -- forward --------------------------------------------------------------------------------

    def enter(self, arguments: object) -> Tree:
        """Gather, once ``arguments`` are computed; gives them back, for the module."""
        tensors = collect(arguments, _is_xla)
        if not tensors or not self.unit.shards:
            self.gather([])
            self._put_fulls()
            return arguments
        fresh = iter(_Enter.apply(self, *tensors))
        self._put_fulls()
        return map_selected(arguments, _is_xla, lambda _old: next(fresh))

    def gather(self, dependencies: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Make the bases; with a barrier after ``dependencies``, whose values come back."""
        options = self.unit.options
        values, fresh = self._parts_behind(dependencies, options.barrier_in_forward)
        self.bases = self.unit.gathered(values)
        return fresh

    def _parts_behind(
        self, dependencies: Sequence[torch.Tensor], fence: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        parts = [shard.parameter.detach() for shard in self.unit.shards]
        if not fence or not parts:
            return parts, [d.detach() for d in dependencies]
        values = operators.behind_barrier([*parts, *dependencies])
        return values[: len(parts)], values[len(parts) :]

    def _put_fulls(self) -> None:
        unit = self.unit
        self.fulls = [
            shard.layout.full(base) for shard, base in zip(unit.shards, self.bases, strict=True)
        ]
        if torch.is_grad_enabled():
            for bucket in unit.buckets():
                gathered = _Full.apply(self, bucket, *(unit.shards[p].parameter for p in bucket))
                for position, full in zip(bucket, gathered, strict=True):
                    self.fulls[position] = full
        unit.put(self.fulls)

    def leave(self, results: Tree) -> Tree:
        """The module's results, tied to this call's backward pass."""
        self.unit.clear()
        if not torch.is_grad_enabled():
            return results
        tensors = [t for t in collect(results, _is_xla) if t.requires_grad]
        chosen = {id(t) for t in tensors}
        if not tensors:
            return results
        fresh = iter(_Leave.apply(self, *tensors))
        changed = map_selected(results, lambda t: id(t) in chosen, lambda _old: next(fresh))
        if self.frees:
            self.free()
        return changed

    def free(self) -> None:
        """Take the values from the gathered parameters' storages; what autograd saved looks at them."""
        for shard, base in zip(self.unit.shards, self.bases, strict=True):
            revoke(base, NoValueError(MSG_FREED.format(name=shard.path)))
        self.freed = True

    # -- backward -------------------------------------------------------------------------------

    def begin_backward(self, gradients: Sequence[object]) -> list[object]:
        """Bring the full parameters back before anything of this call is differentiated."""
        autograd.after_backward(self._end_backward)
        if self.freed:
            gradients = self._gather_again(gradients)
        self.unit.put(self.fulls)  # for what is computed again
        return list(gradients)

    def _gather_again(self, gradients: Sequence[object]) -> list[object]:
        present = [g for g in gradients if g is not None]
        values, fresh = self._parts_behind(present, self.unit.options.barrier_in_backward)
        for base, again in zip(self.bases, self.unit.gathered(values), strict=True):
            restore_value(base, again)
        self.freed = False
        remaining = iter(fresh)
        return [None if g is None else next(remaining) for g in gradients]

    def _end_backward(self) -> None:
        # what still holds the graph (a loss) would make the full parameters results of the step
        self.free()
        self.unit.clear()
        self.finish()


def _is_xla(value: object) -> bool:
    return isinstance(value, XLATensor)


def _fenced(gradients: Iterable[object], fence: bool) -> list[object]:
    """Gradients behind one barrier; None stays None."""
    all_ = list(gradients)
    there = [g for g in all_ if g is not None]
    if not fence or not there:
        return all_
    fresh = iter(operators.behind_barrier(there))
    return [None if g is None else next(fresh) for g in all_]


class _Enter(Function):
    """The arguments of a call, behind a barrier with the parts that are gathered next."""

    @staticmethod
    def forward(ctx: FunctionCtx, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same values."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        fresh = call.gather(tensors)
        ctx.mark_non_differentiable(
            *(
                f
                for f, t in zip(fresh, tensors, strict=True)
                if not (t.is_floating_point() or t.is_complex())
            )
        )
        return tuple(fresh)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor | None) -> Gradients:
        """The gradients, all of which are there before what came before goes on."""
        return None, *_fenced(gradients, ctx.call.unit.options.barrier_in_backward)


class _Leave(Function):
    """The results of a call; in the backward pass this is where it begins."""

    @staticmethod
    def forward(ctx: FunctionCtx, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same values, in storages that are not the parameters'."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        if call.unit.options.barrier_in_forward:
            return tuple(operators.behind_barrier(tensors))
        return tuple(t.clone() for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor | None) -> Gradients:
        """The gradients, once the full parameters are back."""
        return None, *ctx.call.begin_backward(gradients)


class _Full(Function):
    """Full parameters as functions of this replica's parts: the gradients are reduced and cut."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, call: Call, positions: Sequence[int], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """What was gathered already."""
        del parts
        # not the call, which holds the results: a cycle would keep them until Python looks for it
        ctx.unit, ctx.positions = call.unit, positions
        ctx.set_materialize_grads(False)
        return tuple(call.fulls[p].detach() for p in positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor | None) -> Gradients:
        """The parts' gradients: means over the replicas."""
        unit = ctx.unit
        gradients = tuple(_fenced(gradients, unit.options.barrier_in_backward))
        means = unit.reduced(ctx.positions, gradients)
        return None, None, *_fenced(means, unit.options.barrier_in_backward)
