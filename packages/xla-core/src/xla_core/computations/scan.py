"""``scan``: applies a function along the leading dimension of tensors, as one loop of the program.

The function and its gradient are recorded once, and both passes are loops. The forward loop stacks the values of
each iteration that the backward loop reads. The backward loop runs in reverse order, and sums the gradients of
captured tensors. Each iteration has random numbers of its own.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import torch
from functorch.compile import default_partition

from xla_core.computations import forward_backward as joints
from xla_core.computations import pytrees
from xla_core.computations.body_recorder import needed
from xla_core.computations.computation import Computation
from xla_core.computations.forward_backward import Joint, Passes, Recorded, snapshot
from xla_core.computations.rematerialization import PartitionFn
from xla_core.operators.tensor_meta import TensorMeta, tensor_meta
from xla_core.recording.trace import Entry
from xla_core.recording.xla_tensor import XLATensor
from xla_core.support import caches
from xla_core.torch_bridge.dtypes import numpy_dtype
from xla_core.torch_bridge.operands import Tree

WHAT: Final = "the function of scan"
MSG_CALLABLE: Final = "`fn` {fn} must be callable."
MSG_EMPTY: Final = "`xs` {xs} is an empty PyTree."
MSG_LENGTHS: Final = (
    "The leaves of the `xs` input PyTree must have the same leading dimension size. "
    "Got {one} and {other}"
)
MSG_SCALAR: Final = "a leaf of `xs` has no dimensions; scan needs a leading one"
MSG_PAIR: Final = "`fn` must return a pair, the next carry and an output; it returned {got}"
MSG_CARRY: Final = (
    "`fn` must keep the `carry` unchanged in structure, shapes and dtypes. "
    "Got {got} but expected {wanted}"
)


def scan(
    fn: Callable[[object, object], tuple[object, object]],
    init: Tree,
    xs: Tree,
    partition_fn: PartitionFn = default_partition,
    is_fn_pure: bool = False,
) -> tuple[Tree, Tree]:
    """Compute ``carry, y = fn(carry, x)`` for each ``x`` in ``xs``; returns the last carry and the stacked ``y``.

    ``init`` (the first carry), ``xs`` and the results of ``fn`` are pytrees of ``xla`` tensors, or None. The leaves
    of
    ``xs`` have a common size of the leading dimension, which those of ``x`` lack. ``fn`` is recorded, so it must
    not read values, or write in place to its arguments or captured tensors. Gradients flow to ``init``, ``xs`` and
    captured tensors. ``partition_fn`` chooses which values are saved for the backward pass;
    ``functorch.compile.min_cut_rematerialization_partition`` computes cheap ones again. With ``is_fn_pure``
    (default: False) ``fn`` is called once per shapes and dtypes; later calls use its numbers of that time, but the
    present values of captured tensors. Raises ValueError for leaves of different lengths and for a carry that
    changes its structure, shapes or dtypes.
    """
    if not callable(fn):
        raise ValueError(MSG_CALLABLE.format(fn=fn))
    carries, structure = pytrees.flatten(init, "`init`")
    items, item_structure = pytrees.flatten(xs, "`xs`")
    length = _length(xs, items)
    call = _Call(fn, structure, item_structure, carries, items, partition_fn)
    cache = _pure.setdefault(fn, {}) if is_fn_pure else {}
    key = call.key()
    traced = cache.get(key)
    if traced is None:
        if len(cache) >= caches.MOST:
            cache.clear()
        traced = cache[key] = call.record()
    recorded, results = traced
    tensors = [*carries, *items, *recorded.differentiable]
    passes = _Scan(recorded, len(carries), length)
    values = recorded.checked(joints.run(passes, tensors))
    carry, stacked = values[: len(carries)], values[len(carries) :]
    return structure.unflatten(carry), results.unflatten(stacked)


_Recording = tuple[Recorded, pytrees.Structure]
_pure: weakref.WeakKeyDictionary[object, dict[Hashable, _Recording]] = weakref.WeakKeyDictionary()


def _length(xs: Tree, items: Sequence[torch.Tensor]) -> int:
    if not items:
        raise ValueError(MSG_EMPTY.format(xs=xs))
    if any(not t.dim() for t in items):
        raise ValueError(MSG_SCALAR)
    length = len(items[0])
    for t in items:
        if len(t) != length:
            raise ValueError(MSG_LENGTHS.format(one=length, other=len(t)))
    return length


@dataclasses.dataclass
class _Call:
    """The arguments of one call of ``scan``, which record its function."""

    fn: Callable[[object, object], tuple[object, object]]
    structure: pytrees.Structure
    item_structure: pytrees.Structure
    carries: Sequence[XLATensor]
    items: Sequence[XLATensor]
    partition_fn: PartitionFn
    results: list[pytrees.Structure] = dataclasses.field(default_factory=list)

    def key(self) -> Hashable:
        """The key of the recording, among those of ``fn``."""
        tensors = [*self.carries, *self.items]
        return (
            *(self.structure, self.item_structure, self.partition_fn, self._metas()),
            tuple(t.requires_grad for t in tensors),
            joints.modes(),
            self.items[0].device,
        )

    def _metas(self) -> tuple[TensorMeta, ...]:
        items = (tensor_meta(m.shape[1:], m.dtype) for m in pytrees.metas(self.items))
        return (*pytrees.metas(self.carries), *items)

    def record(self) -> _Recording:
        """Record ``fn`` with its gradient; returns the recording, and the structure of the outputs."""
        # a carry needs a gradient even if ``init`` does not: earlier iterations contribute to it
        flows = [_has_gradient(m) for m in pytrees.metas(self.carries)]
        recorded = joints.record(
            self.items[0]._s.trace,
            WHAT,
            self._flat,
            self._metas(),
            [*flows, *(t.requires_grad for t in self.items)],
            wanted=any(t.requires_grad for t in (*self.carries, *self.items)),
            partition_fn=self.partition_fn,
        )
        return recorded, self.results[-1]

    def _flat(self, given: list[XLATensor]) -> list[torch.Tensor]:
        count = len(self.carries)
        pair = self.fn(
            self.structure.unflatten(given[:count]), self.item_structure.unflatten(given[count:])
        )
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(MSG_PAIR.format(got=type(pair).__name__))
        carry, structure = pytrees.flatten(pair[0], "the carry that `fn` returned")
        got, wanted = pytrees.metas(carry), pytrees.metas(self.carries)
        if structure != self.structure or got != wanted:
            different = structure if got == wanted else list(got)
            expected = self.structure if got == wanted else list(wanted)
            raise ValueError(MSG_CARRY.format(got=different, wanted=expected))
        ys, results = pytrees.flatten(pair[1], "the output that `fn` returned")
        self.results.append(results)
        return [*carry, *ys]


def _has_gradient(meta: TensorMeta) -> bool:
    return meta.dtype.is_floating_point or meta.dtype.is_complex


class _Loops:
    """The loops of both passes over ``length`` items; the first ``carries`` arguments are the carry.

    ``kept`` are the values that the forward loop stacks for the backward loop, ``items`` the arguments that the
    backward loop also reads, and ``steady`` the carried values that no iteration changes. ``stacked`` are all
    values that the forward loop stacks. ``has_gradient`` says for each argument, and each captured tensor that
    needs a gradient, whether the backward loop computes one.
    """

    def __init__(self, joint: Joint, carries: int, length: int) -> None:
        self.joint, self.carries, self.length = joint, carries, length
        sources = [(v, joint.inputs[v]) for v in joint.reads]
        steady = {v for i, v in enumerate(joint.outputs[:carries]) if joint.inputs.get(v) == i}
        changing = (v for v, s in sources if 0 <= s < carries and v not in steady)
        self.kept = (*joint.saved, *changing)
        self.items = {v: s for v, s in sources if s >= carries}
        self.steady = {v: s for v, s in sources if v in steady}
        self.stacked = tuple(dict.fromkeys((*joint.outputs[carries:], *self.kept)))
        metas = joint.argument_metas
        self.flowing = [i for i in range(carries) if joint.gradients and _has_gradient(metas[i])]
        self.has_gradient = [
            i in self.flowing if i < carries else g is not None
            for i, g in enumerate(joint.gradients)
        ]
        self.forward = self._forward()
        self.backward = self._backward() if joint.differentiable else None

    def _computation(
        self,
        name: str,
        evaluate: jax.Array,
        outputs: Sequence[TensorMeta],
        entries: Sequence[Entry],
    ) -> Computation:
        text = self.joint.text() + repr((self.carries, self.length)).encode()
        random = self.joint.body.is_random(entries)
        return Computation(name, text, outputs, evaluate, random=random)

    def _forward(self) -> Computation:
        joint, carries = self.joint, self.carries
        entries = needed(joint.body.entries, (*joint.outputs[:carries], *self.stacked))
        count = joint.arguments

        def evaluate(
            tensors: jax.Array, floats: jax.Array, ints: jax.Array, key: jax.Array
        ) -> list[jax.Array]:
            def step(carry: Tree, item: jax.Array) -> tuple[Tree, Tree]:
                index, x = item
                sources = (*carry, *x, *reversed(tensors[count:]))
                given = {v: sources[s] for v, s in joint.inputs.items()}
                own = None if key is None else jax.random.fold_in(key, index)
                scope = joint.body.run(entries, given, floats, ints, own)
                return tuple(scope[v] for v in joint.outputs[:carries]), tuple(
                    scope[v] for v in self.stacked
                )

            items = (self._indices(key), tuple(tensors[carries:count]))
            carry, ys = jax.lax.scan(step, tuple(tensors[:carries]), items, self.length)
            return [*carry, *ys]

        body = joint.body
        outputs = [body.meta(v) for v in joint.outputs[:carries]]
        stacks = [self._stack(body.meta(v)) for v in self.stacked]
        return self._computation("scan", evaluate, [*outputs, *stacks], entries)

    def _stack(self, meta: TensorMeta) -> TensorMeta:
        return tensor_meta((self.length, *meta.shape), meta.dtype)

    def _indices(self, key: jax.Array) -> jax.Array:
        """The numbers of the iterations if random numbers depend on them, else None."""
        return None if key is None else jnp.arange(self.length)

    def _backward(self) -> Computation:
        joint, carries, body = self.joint, self.carries, self.joint.body
        of_items = joint.gradients[carries : joint.arguments]
        of_captured = [g for g in joint.gradients[joint.arguments :] if g is not None]
        tangents = joint.tangents
        counts = (len(self.kept), len(self.items), len(self.steady), joint.captures)

        def evaluate(
            tensors: jax.Array, floats: jax.Array, ints: jax.Array, key: jax.Array
        ) -> list[jax.Array]:
            kept, items, steady, held, gradients = _split(tensors, counts)
            results = dict(
                zip((i for i, t in enumerate(tangents) if t is not None), gradients, strict=True)
            )

            def step(state: Tree, item: jax.Array) -> tuple[Tree, Tree]:
                flowing, sums = state
                index, *of_item = item
                given = self._given_back(of_item, steady, held, flowing)
                own = None if key is None else jax.random.fold_in(key, index)
                scope = body.run(joint.backward, given, floats, ints, own)
                before = {
                    i: _zeros(joint.argument_metas[i]) if g is None else scope[g]
                    for i, g in enumerate(joint.gradients[:carries])
                    if i in flowing
                }
                added = tuple(s + scope[g] for s, g in zip(sums, of_captured, strict=True))
                return (before, added), tuple(scope[g] for g in of_items if g is not None)

            start = {i: results.get(i, _zeros(joint.argument_metas[i])) for i in self.flowing}
            sums = tuple(_zeros(body.meta(g)) for g in of_captured)
            of_ys = {i: g for i, g in results.items() if i >= carries}
            xs = (self._indices(key), tuple(kept), tuple(items), of_ys)
            (flowing, sums), stacked = jax.lax.scan(
                step, (start, sums), xs, self.length, reverse=True
            )
            return [*(flowing[i] for i in self.flowing), *stacked, *sums]

        outputs = [
            *(joint.argument_metas[i] for i in self.flowing),
            *(self._stack(body.meta(g)) for g in of_items if g is not None),
            *(body.meta(g) for g in of_captured),
        ]
        return self._computation("scan_backward", evaluate, outputs, joint.backward)

    def _given_back(
        self,
        of_item: Tree,
        steady: Sequence[Tree],
        held: Sequence[Tree],
        flowing: Mapping[int, Tree],
    ) -> dict[int, Tree]:
        """The inputs of one iteration of the backward pass, by value numbers.

        ``of_item`` are its kept values, its items and the gradients of its results; ``flowing`` are the gradients
        of the carry.
        """
        tangents = self.joint.tangents
        kept, items, of_ys = of_item
        given = dict(zip((*self.kept, *self.items), (*kept, *items), strict=True))
        given.update(zip(self.steady, steady, strict=True))
        given.update((v, held[-1 - s]) for v, s in self.joint.inputs.items() if s < 0)
        given.update((tangents[i], g) for i, g in of_ys.items())
        given.update((t, g) for i, g in flowing.items() if (t := tangents[i]) is not None)
        return given


def _split(items: Sequence[Tree], counts: Sequence[int]) -> list[Sequence[object]]:
    """The items cut into parts of these lengths, and the rest."""
    parts = []
    for count in counts:
        parts.append(items[:count])
        items = items[count:]
    return [*parts, items]


def _zeros(meta: TensorMeta) -> jax.Array:
    return jnp.zeros(meta.shape, numpy_dtype(meta.dtype))


class _Scan(Passes):
    """The two loops, for one call."""

    def __init__(self, recorded: Recorded, carries: int, length: int) -> None:
        self.recorded = recorded
        known = recorded.joint.programs
        key = (_Loops, carries, length)
        self.loops: _Loops = known.get(key) or _Loops(recorded.joint, carries, length)
        known[key] = self.loops

    def forward(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[bool], list[torch.Tensor]]:
        recorded, loops = self.recorded, self.loops
        joint = recorded.joint
        arguments = [snapshot(t) for t in tensors[: joint.arguments]]
        captured = [snapshot(s) for s in recorded.captured]
        outputs = loops.forward((*arguments, *captured), recorded.floats, recorded.ints)
        carry, stacked = outputs[: loops.carries], outputs[loops.carries :]
        of = dict(zip(loops.stacked, stacked, strict=True))
        results = [*carry, *(snapshot(of[v]) for v in joint.outputs[loops.carries :])]
        unstacked = [arguments[s] for s in (*loops.items.values(), *loops.steady.values())]
        saved = [*(of[v] for v in loops.kept), *unstacked, *captured]
        return results, [t is not None for t in joint.tangents], saved

    def backward(
        self, saved: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        recorded, loops = self.recorded, self.loops
        tangents = recorded.joint.tangents
        wanted = [g for g, t in zip(gradients, tangents, strict=True) if t is not None]
        assert loops.backward is not None
        remaining = iter(loops.backward((*saved, *wanted), recorded.floats, recorded.ints))
        return [next(remaining) if has else None for has in loops.has_gradient]
