"""StableHLO's collectives over replicas, as jax primitives.

Each is one operation with replica groups and without a channel: it communicates with the same operation in the
other replicas' copies of the program. ``groups`` is a tuple of tuples of replica numbers, all of one length.
``after`` orders operations across programs: see ``ordered``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from xla_core.extension_api.lowering import JaxObject, Primitive, ir, stablehlo

Groups = tuple[tuple[int, ...], ...]

# On the CPU, operands of one all_reduce are joined up to this size.
_BUCKET_BYTES: Final = 4 << 20


def _groups_attribute(groups: Groups) -> ir.DenseIntElementsAttr:
    return ir.DenseIntElementsAttr.get(np.array(groups, np.int64))


def _types(ctx: mlir.LoweringRuleContext, *operands: jax.Array) -> list[ir.Type]:
    """The result types: the shapes of the abstract values, with the element types of the operands."""
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


def _resized(axis: int, change: Callable[[int], int]) -> Callable[[JaxObject], JaxObject]:
    def shape_of(aval: JaxObject) -> JaxObject:
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


def _fill_region(region: ir.Region, kind: str, element: ir.Type) -> None:
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
    """``all_reduce`` on the CPU, which joins small operands: a call over the network costs more than a copy."""
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
    """The concatenation of vectors.

    Each vector is written into the result by an update of its own. XLA would fuse the computation of the
    operands into the loop of a concatenation, and compute all of it for each element: 100 ms for 1.6 MB,
    where one operand was a sum over a batch.
    """
    if len(flat) == 1:
        return flat[0]
    joined, start = jnp.zeros(sum(x.size for x in flat), flat[0].dtype), 0
    for x in flat:
        joined = jax.lax.dynamic_update_slice(joined, x, (start,))
        start += x.size
    return joined


def _buckets(arrays: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Consecutive arrays of at most ``_BUCKET_BYTES`` together; a larger array is alone."""
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
    """The reductions of ``operands``, which have one dtype, over this replica's group.

    ``kind`` is ``sum``, ``mul``, ``min`` or ``max``; ``after`` is that of ``ordered``.
    """
    return _all_reduce.bind(*operands, after, kind=kind, groups=groups)


def reduce_scatter(operand: jax.Array, kind: str, axis: int, groups: Groups) -> jax.Array:
    """This replica's slice along ``axis`` of the reduction of ``operand`` over its group."""
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
    """The values of the group's replicas, concatenated along ``axis``."""
    return _all_gather.bind(operand, axis=axis, groups=groups)


def all_to_all(operand: jax.Array, split: int, concat: int, groups: Groups) -> jax.Array:
    """Send slice i along ``split`` to the group's replica i; the received slices, concatenated along ``concat``."""
    count = len(groups[0])
    return _all_to_all.bind(operand, split=split, concat=concat, count=count, groups=groups)


def collective_permute(operand: jax.Array, pairs: Groups) -> jax.Array:
    """The operand of the replica that sends to this one, by ``pairs`` of (source, target); zeros if none does."""
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
    # differs from ``first`` for every value: the compiler would drop a choice between equal values
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
    """``operand``, which cannot be computed before ``after``, a uint32 scalar.

    On the CPU, replicas match collectives by their order. One replica's program may contain operations that
    another's does not (a mean for a log line, for example), so the compiler must keep the order in which
    collectives were recorded. It removes barriers before it schedules, and any dependence that it can compute away;
    it keeps this one, which changes the operand if ``after | 1`` is 0, which never happens. This also keeps the
    compiler from treating a constant operand as equal on all replicas, whose programs may have different constants.
    Other devices match collectives by their place in the program, which is the same on all replicas, and need no
    dependence.
    """
    return _ordered.bind(operand, after)


def order_of(result: jax.Array) -> jax.Array:
    """A uint32 scalar that cannot be computed before ``result``."""
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
    """``groups`` as tuples; one group of all ``size`` replicas if ``groups`` is empty.

    Raises ValueError unless each replica is in exactly one group, and all groups have one size.
    """
    if not groups:
        return (tuple(range(size)),)
    as_tuples = tuple(tuple(int(r) for r in group) for group in groups)
    members = sorted(r for group in as_tuples for r in group)
    if members != list(range(size)) or len({len(g) for g in as_tuples}) != 1:
        raise ValueError(
            f"groups={[list(g) for g in as_tuples]}: each of the {size} replicas must be in exactly one "
            "group, and all groups must have one size"
        )
    return as_tuples
