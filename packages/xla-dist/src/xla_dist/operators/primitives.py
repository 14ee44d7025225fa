"""StableHLO's collectives over replicas, as jax primitives.

Each is one operation with replica groups and without a channel: it talks to the same operation of
the other replicas' copies of the program. ``groups`` is a tuple of tuples of replica numbers, all of
one length. ``after`` gives operations an order that holds across programs: see ``ordered``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from xla_core.extension_api.lowering import Primitive, ir, stablehlo

Groups = tuple[tuple[int, ...], ...]

# Operands of one all_reduce travel together up to this size on the CPU.
_BUCKET_BYTES: Final = 4 << 20


def _groups_attribute(groups: Groups) -> ir.DenseIntElementsAttr:
    return ir.DenseIntElementsAttr.get(np.array(groups, np.int64))


def _types(ctx: mlir.LoweringRuleContext, *operands: jax.Array) -> list[ir.Type]:
    """Result types: the shapes promised, with the element types of the operands."""
    elements = [ir.RankedTensorType(x.type).element_type for x in operands]
    return [
        ir.RankedTensorType.get(list(aval.shape), element)
        for aval, element in zip(ctx.avals_out, elements, strict=True)
    ]


def _primitive(
    name: str, shape_of: Callable[..., object], lowering: Callable[..., object]
) -> Primitive:
    primitive = Primitive(name)
    primitive.def_abstract_eval(shape_of)
    mlir.register_lowering(primitive, lowering)
    return primitive


def _resized(axis: int, change: Callable[[int], int]) -> Callable[[Any], Any]:
    def shape_of(aval: Any) -> jax.Array:
        shape = list(aval.shape)
        shape[axis] = change(shape[axis])
        return aval.update(shape=tuple(shape))

    return shape_of


# --- reductions ---------------------------------------------------------------------------------

_COMBINE: Final[dict[str, Callable[..., jax.Array]]] = {
    "sum": stablehlo.add,
    "mul": stablehlo.multiply,
    "min": stablehlo.minimum,
    "max": stablehlo.maximum,
}


def _fill_region(region: Any, kind: str, element: ir.Type) -> None:
    scalar = ir.RankedTensorType.get([], element)
    block = region.blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        stablehlo.return_([_COMBINE[kind](*block.arguments)])


def _lower_native(
    ctx: mlir.LoweringRuleContext, *operands: jax.Array, kind: str, groups: Groups
) -> jax.Array:
    operation = stablehlo.AllReduceOp(_types(ctx, *operands), operands, _groups_attribute(groups))
    _fill_region(operation.regions[0], kind, ir.RankedTensorType(operands[0].type).element_type)
    return operation.results


def _lower_all_reduce(
    ctx: mlir.LoweringRuleContext, *operands: jax.Array, kind: str, groups: Groups
) -> jax.Array:
    return _lower_native(ctx, *operands[:-1], kind=kind, groups=groups)


def _all_reduce_on_cpu(*operands: jax.Array, kind: str, groups: Groups) -> list[jax.Array]:
    """Small operands travel together: on a CPU's network a call costs more than a copy."""
    *arrays, after = operands
    results: list[object] = []
    for bucket in _buckets(arrays):
        flat = [x.reshape(-1) for x in bucket]
        joined = _ordered_on_cpu(_joined(flat), after)
        (reduced,) = _native.bind(joined, kind=kind, groups=groups)
        after = order_of(reduced)
        ends = np.cumsum([x.size for x in flat])[:-1].tolist()
        parts = jnp.split(reduced, ends) if len(flat) > 1 else [reduced]
        results += [p.reshape(x.shape) for p, x in zip(parts, bucket, strict=True)]
    return results


def _joined(flat: Sequence[jax.Array]) -> jax.Array:
    """Vectors one after the other.

    Written one by one: XLA makes what computes them a part of the loop that concatenates, where
    every element then pays for all of it (a sum over a batch among it; 100 ms for 1.6 MB were seen).
    """
    if len(flat) == 1:
        return flat[0]
    joined, start = jnp.zeros(sum(x.size for x in flat), flat[0].dtype), 0
    for x in flat:
        joined = jax.lax.dynamic_update_slice(joined, x, (start,))
        start += x.size
    return joined


def _buckets(arrays: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Neighbours together up to ``_BUCKET_BYTES``, larger ones alone."""
    buckets: list[list[jax.Array]] = []
    free = 0
    for x in arrays:
        nbytes = x.size * x.dtype.itemsize
        if not buckets or nbytes > free:
            buckets.append([])
            free = _BUCKET_BYTES
        buckets[-1].append(x)
        free -= nbytes
    return buckets


def _lower_reduce_scatter(
    ctx: mlir.LoweringRuleContext, operand: jax.Array, *, kind: str, axis: int, groups: Groups
) -> jax.Array:
    types = _types(ctx, operand)
    operation = stablehlo.ReduceScatterOp(types[0], operand, axis, _groups_attribute(groups))
    _fill_region(operation.regions[0], kind, ir.RankedTensorType(operand.type).element_type)
    return operation.results


_native: Final = _primitive(
    "xla_all_reduce", lambda *avals, kind, groups: list(avals), _lower_native
)
_native.multiple_results = True
_all_reduce: Final = _primitive(
    "xla_all_reduce_after", lambda *avals, kind, groups: list(avals[:-1]), _lower_all_reduce
)
_all_reduce.multiple_results = True
mlir.register_lowering(
    _all_reduce, mlir.lower_fun(_all_reduce_on_cpu, multiple_results=True), platform="cpu"
)
_reduce_scatter: Final = _primitive(
    "xla_reduce_scatter",
    lambda aval, kind, axis, groups: _resized(axis, lambda n: n // len(groups[0]))(aval),
    _lower_reduce_scatter,
)


def all_reduce(
    operands: Sequence[jax.Array], kind: str, groups: Groups, after: jax.Array
) -> list[jax.Array]:
    """Each of ``operands``, which have one dtype, reduced (``sum, mul, min, max``) over its group.

    ``after`` as in ``ordered``.
    """
    return _all_reduce.bind(*operands, after, kind=kind, groups=groups)


def reduce_scatter(operand: jax.Array, kind: str, axis: int, groups: Groups) -> jax.Array:
    """This replica's slice along ``axis`` of the reduction."""
    return _reduce_scatter.bind(operand, kind=kind, axis=axis, groups=groups)


# --- movements ----------------------------------------------------------------------------------


def _lower_all_gather(
    ctx: mlir.LoweringRuleContext, operand: jax.Array, *, axis: int, groups: Groups
) -> jax.Array:
    return stablehlo.AllGatherOp(
        _types(ctx, operand), [operand], axis, _groups_attribute(groups)
    ).results


def _lower_all_to_all(
    ctx: mlir.LoweringRuleContext,
    operand: jax.Array,
    *,
    split: int,
    concat: int,
    count: int,
    groups: Groups,
) -> jax.Array:
    return stablehlo.AllToAllOp(
        [operand],
        split_dimension=split,
        concat_dimension=concat,
        split_count=count,
        replica_groups=_groups_attribute(groups),
    ).results


def _lower_permute(
    ctx: mlir.LoweringRuleContext, operand: jax.Array, *, pairs: Groups
) -> jax.Array:
    table = ir.DenseIntElementsAttr.get(np.array(pairs, np.int64).reshape(-1, 2))
    return [stablehlo.CollectivePermuteOp(operand, table).result]


def _all_to_all_shape(
    aval: object, split: int, concat: int, count: int, groups: Groups
) -> jax.Array:
    return _resized(concat, lambda n: n * count)(_resized(split, lambda n: n // count)(aval))


def _lower_replica(_ctx: mlir.LoweringRuleContext) -> jax.Array:
    return [stablehlo.ReplicaIdOp().result]


_all_gather: Final = _primitive(
    "xla_all_gather",
    lambda aval, axis, groups: _resized(axis, lambda n: n * len(groups[0]))(aval),
    _lower_all_gather,
)
_all_to_all: Final = _primitive("xla_all_to_all", _all_to_all_shape, _lower_all_to_all)
_permute: Final = _primitive("xla_collective_permute", lambda aval, pairs: aval, _lower_permute)
_replica: Final = _primitive(
    "xla_replica", lambda: jax.core.ShapedArray((), np.uint32), _lower_replica
)


def all_gather(operand: jax.Array, axis: int, groups: Groups) -> jax.Array:
    """The group's values side by side along ``axis``."""
    return _all_gather.bind(operand, axis=axis, groups=groups)


def all_to_all(operand: jax.Array, split: int, concat: int, groups: Groups) -> jax.Array:
    """Slice i along ``split`` goes to the group's i-th replica; what comes is joined along ``concat``."""
    count = len(groups[0])
    return _all_to_all.bind(operand, split=split, concat=concat, count=count, groups=groups)


def collective_permute(operand: jax.Array, pairs: Groups) -> jax.Array:
    """The value of the replica that ``pairs`` (source, target) sends here; zeros if none does."""
    return _permute.bind(operand, pairs=pairs)


def replica() -> jax.Array:
    """This replica's number, a uint32 scalar."""
    return _replica.bind()


# --- order --------------------------------------------------------------------------------------


def _ordered_on_cpu(operand: jax.Array, after: jax.Array) -> jax.Array:
    if operand.size == 0:
        return operand
    first = operand[(slice(0, 1),) * operand.ndim]
    never = (after | jnp.uint32(1)) == jnp.uint32(0)
    # another value than it has, whatever it is: the compiler drops a choice between two equal ones
    other = (first == jnp.zeros_like(first)).astype(first.dtype)
    first = jnp.where(never, other, first)
    zeros = (jnp.uint32(0),) * operand.ndim
    return jax.lax.dynamic_update_slice(operand, first, zeros) if operand.ndim else first


_ordered: Final = Primitive("xla_ordered")
_ordered.def_abstract_eval(lambda operand, after: operand)
mlir.register_lowering(_ordered, lambda ctx, operand, after: [operand])
mlir.register_lowering(
    _ordered, mlir.lower_fun(_ordered_on_cpu, multiple_results=False), platform="cpu"
)


def ordered(operand: jax.Array, after: jax.Array) -> jax.Array:
    """``operand``, available only once the uint32 scalar ``after`` is.

    The CPU's replicas match collectives by their order, and a replica's program may hold work that
    another's does not (a log line's mean), so the compiler must keep the order in which they were
    recorded. It removes barriers before it schedules, and sees through anything it can compute: this
    dependence, on a bit pattern that never comes, it keeps. Nor may it take a constant operand for
    one that all replicas have: another replica's program may have another constant. Other devices
    match collectives by the program, which is the same everywhere there: no dependence.
    """
    return _ordered.bind(operand, after)


def order_of(result: jax.Array) -> jax.Array:
    """A uint32 scalar that is available once ``result`` is."""
    if result.size == 0:
        return jnp.uint32(0)
    first = result[(slice(0, 1),) * result.ndim].reshape(())
    if jnp.issubdtype(first.dtype, jnp.complexfloating):
        first = first.real
    if first.dtype == jnp.bool_:
        return first.astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(first, jnp.dtype(f"uint{8 * first.dtype.itemsize}"))
    return bits.astype(jnp.uint32)


def world(groups: Sequence[Sequence[int]], size: int) -> Groups:
    """``groups`` as a tuple; one group of all ``size`` replicas when it is empty.

    Raises ValueError when the groups are not of one size or do not name every replica once.
    """
    if not groups:
        return (tuple(range(size)),)
    checked = tuple(tuple(int(r) for r in group) for group in groups)
    named = sorted(r for group in checked for r in group)
    if named != list(range(size)) or len({len(g) for g in checked}) != 1:
        raise ValueError(
            f"groups={[list(g) for g in checked]}: each of the {size} replicas must be in exactly one "
            "group, and all groups must have one size"
        )
    return checked
