"""The operations that a sharded module records: gather, free after the forward pass, gather again, reduce.

Nothing runs when it is recorded. A full parameter is a value in the step's program, and how long it occupies memory
depends on its uses in the program. For the backward pass, PyTorch saves tensors that are views of a gathered
parameter's storage. To save memory, we revoke that storage's value after the forward pass. When the
module's backward pass begins, the storage gets the value of a second gather. An optimization barrier before that
gather keeps the compiler from merging it with the first.
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
    "the full parameter {name} was freed after the forward pass of its sharded module, and was not gathered again, "
    "because the backward pass reached no tensor that the module returned; return tensors, or lists, "
    "dicts or dataclasses of them, or use reshard_after_forward=False"
)


@dataclasses.dataclass(frozen=True)
class Place:
    """A module's attribute of shape ``size`` that holds a full parameter while the module computes.

    ``start`` is the index of its first element in a flat parameter; None if its parameter is not flattened.
    """

    module: nn.Module
    attribute: str
    size: torch.Size
    start: int | None = None

    def put(self, full: torch.Tensor) -> None:
        """Set the attribute to the full parameter, a view of ``full``."""
        if self.start is not None:
            full = full[self.start : self.start + self.size.numel()].view(self.size)
        setattr(self.module, self.attribute, full)

    def clear(self) -> None:
        """Set the attribute to a meta tensor, which has the right shape but raises in computations."""
        setattr(self.module, self.attribute, self._shape_only)

    @functools.cached_property
    def _shape_only(self) -> torch.Tensor:
        return torch.empty(self.size, device="meta")


@dataclasses.dataclass(frozen=True)
class Shard:
    """One sharded parameter.

    ``parameter`` is this replica's part, ``layout`` says how it was cut, ``path`` is its name in the
    wrapper, and ``places`` are the modules' attributes that it belongs to.
    """

    parameter: nn.Parameter
    layout: Layout
    path: str
    places: tuple[Place, ...]

    @property
    def trains(self) -> bool:
        """Whether the parameter requires gradients."""
        return self.parameter.requires_grad


@dataclasses.dataclass
class Options:
    """How a unit gathers parameters and reduces gradients; see ``XlaFullyShardedDataParallel``.

    Gradients are divided by ``predivide`` before the reduction, multiplied by ``scale`` in it, and divided by
    ``postdivide`` after it.
    """

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
    """The sharded parameters of one wrapper.

    ``reduces`` is whether backward passes reduce gradients; without it (``no_sync``) they add up full gradients.
    """

    def __init__(self, shards: Sequence[Shard], options: Options) -> None:
        self.shards = list(shards)
        self.options = options
        self.reduces = True
        # full gradients of backward passes that reduced nothing, by the parameter's index in ``shards``
        self.unreduced: dict[int, torch.Tensor] = {}
        self.clear()

    def clear(self) -> None:
        """Remove the full parameters from the modules."""
        for shard in self.shards:
            for place in shard.places:
                place.clear()

    def put(self, fulls: Sequence[torch.Tensor]) -> None:
        """Set the modules' attributes to their full parameters, one of ``fulls`` for each shard."""
        for shard, full in zip(self.shards, fulls, strict=True):
            for place in shard.places:
                place.put(full)

    def gathered(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The padded full parameters, gathered from the ``parts`` of all replicas, in the compute dtype."""
        options = self.options
        parts = [p.to(options.compute_dtype) for p in parts]
        if options.coalesce and parts:
            coalesced: list[torch.Tensor] = model_collectives.all_gather(parts, 0, options.groups)
            return coalesced
        return [model_collectives.all_gather(p, 0, options.groups) for p in parts]

    def buckets(self) -> Iterator[list[int]]:
        """Lists of indices of the parameters whose gradients one operator reduces, the last parameters first."""
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
        """The gradients of this replica's parts, from full gradients of the parameters ``positions``.

        None for a parameter without a gradient, and for all if ``reduces`` is false.
        """
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
        of_parts = dict(zip(ready, map(self._finished, ready, results), strict=True))
        return [of_parts.get(p) for p in positions]

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
    """One forward pass of a unit, and its backward pass.

    ``frees``: the full parameters are freed after the forward pass, and gathered again. ``finish`` is called at the
    end of the backward pass. ``bases`` are the gathered parameters, padded; ``fulls`` are the full
    parameters, views of them.
    """

    def __init__(self, unit: Unit, frees: bool, finish: Callable[[], None]) -> None:
        self.unit = unit
        self.frees = frees
        self.finish = finish
        self.bases: list[torch.Tensor] = []
        self.fulls: list[torch.Tensor] = []
        self.freed = False

    # -- forward --------------------------------------------------------------------------------

    def enter(self, arguments: object) -> Tree:
        """Gather the full parameters, after ``arguments`` are computed; returns the arguments for the module."""
        tensors = collect(arguments, _is_xla)
        if not tensors or not self.unit.shards:
            self.gather([])
            self._put_fulls()
            return arguments
        replacements = iter(_Enter.apply(self, *tensors))
        self._put_fulls()
        return map_selected(arguments, _is_xla, lambda _tensor: next(replacements))

    def gather(self, dependencies: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gather the bases; returns ``dependencies``, behind one barrier with the parts if there is a barrier."""
        options = self.unit.options
        values, behind = self._parts_behind(dependencies, options.barrier_in_forward)
        self.bases = self.unit.gathered(values)
        return behind

    def _parts_behind(
        self, dependencies: Sequence[torch.Tensor], barrier: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """This replica's parts and ``dependencies``, behind one barrier if ``barrier``."""
        parts = [shard.parameter.detach() for shard in self.unit.shards]
        if not barrier or not parts:
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
        """Free the full parameters if ``frees``; returns the module's results.

        The backward pass of the returned results begins with ``begin_backward``.
        """
        self.unit.clear()
        if not torch.is_grad_enabled():
            return results
        tensors = [t for t in collect(results, _is_xla) if t.requires_grad]
        ids = {id(t) for t in tensors}
        if not tensors:
            return results
        replacements = iter(_Leave.apply(self, *tensors))
        replaced = map_selected(results, lambda t: id(t) in ids, lambda _tensor: next(replacements))
        if self.frees:
            self.free()
        return replaced

    def free(self) -> None:
        """Revoke the values of the gathered parameters' storages, and so of autograd's saved views of them."""
        for shard, base in zip(self.unit.shards, self.bases, strict=True):
            revoke(base, NoValueError(MSG_FREED.format(name=shard.path)))
        self.freed = True

    # -- backward -------------------------------------------------------------------------------

    def begin_backward(self, gradients: Sequence[object]) -> list[object]:
        """Gather freed parameters again, before anything of this call is differentiated; returns the gradients."""
        autograd.after_backward(self._end_backward)
        if self.freed:
            gradients = self._gather_again(gradients)
        self.unit.put(self.fulls)  # checkpointed parts of the module compute again
        return list(gradients)

    def _gather_again(self, gradients: Sequence[object]) -> list[object]:
        present = [g for g in gradients if g is not None]
        values, behind = self._parts_behind(present, self.unit.options.barrier_in_backward)
        for base, gathered in zip(self.bases, self.unit.gathered(values), strict=True):
            restore_value(base, gathered)
        self.freed = False
        remaining = iter(behind)
        return [None if g is None else next(remaining) for g in gradients]

    def _end_backward(self) -> None:
        # a tensor that still holds the graph, such as the loss, would make the full parameters results of the step
        self.free()
        self.unit.clear()
        self.finish()


def _is_xla(value: object) -> bool:
    return isinstance(value, XLATensor)


def _behind_barrier(gradients: Iterable[object], barrier: bool) -> list[object]:
    """The gradients, behind one barrier if ``barrier``; None stays None."""
    listed = list(gradients)
    present = [g for g in listed if g is not None]
    if not barrier or not present:
        return listed
    behind = iter(operators.behind_barrier(present))
    return [None if g is None else next(behind) for g in listed]


class _Enter(Function):
    """The arguments of a call, behind one barrier with the parts that are gathered next."""

    @staticmethod
    def forward(ctx: FunctionCtx, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gather the parameters; returns ``tensors``."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        behind = call.gather(tensors)
        ctx.mark_non_differentiable(
            *(t for t in behind if not (t.is_floating_point() or t.is_complex()))
        )
        return tuple(behind)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor | None) -> Gradients:
        """The gradients, behind one barrier: the backward pass before this call starts when all are computed."""
        return None, *_behind_barrier(gradients, ctx.call.unit.options.barrier_in_backward)


class _Leave(Function):
    """The results of a call; the backward pass of the call begins here."""

    @staticmethod
    def forward(ctx: FunctionCtx, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same values, in new storages: a result may be a view of a parameter, whose storage is freed."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        if call.unit.options.barrier_in_forward:
            return tuple(operators.behind_barrier(tensors))
        return tuple(t.clone() for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor | None) -> Gradients:
        """The gradients, after the full parameters have been gathered again."""
        return None, *ctx.call.begin_backward(gradients)


class _Full(Function):
    """Full parameters as functions of this replica's parts, whose gradients are slices of the reduced gradients."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, call: Call, positions: Sequence[int], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The full parameters ``positions``, which ``call`` has already gathered."""
        del parts
        # not the call, which holds the results: the cycle would keep them alive until garbage collection
        ctx.unit, ctx.positions = call.unit, positions
        ctx.set_materialize_grads(False)
        return tuple(call.fulls[p].detach() for p in positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor | None) -> Gradients:
        """The gradients of the parts: means over the replicas."""
        unit = ctx.unit
        gradients = tuple(_behind_barrier(gradients, unit.options.barrier_in_backward))
        means = unit.reduced(ctx.positions, gradients)
        return None, None, *_behind_barrier(means, unit.options.barrier_in_backward)
