"""The collectives as operators of PyTorch, which are recorded in the trace and compiled with the step.

``groups`` lists the replicas of all groups, ``group_size`` in each; -1 fills a group that has fewer. ``after`` is
the order of the collective that was recorded before (see ``primitives.ordered``), and the last result is the order
of this one, an int32 scalar. A collective stays in the program even if nothing reads its result, because the other
replicas wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import torch

from xla_core.extension_api.operators import Operand, rule
from xla_dist.operators import primitives
from xla_dist.operators.primitives import Groups

REDUCTIONS: Final = ("sum", "mul", "and", "or", "min", "max")

MSG_SPLIT: Final = (
    "{name}: dimension {dim} of size {size} cannot be split evenly over {count} replicas"
)
MSG_DIM: Final = "{name}: there is no dimension {dim} in a tensor of shape {shape}"

_library: Final = torch.library.Library("xla_dist", "DEF")
_GROUPS: Final = "int[] groups, int group_size, Tensor? after"
for _schema in (
    f"all_reduce(Tensor[] inputs, str kind, {_GROUPS}) -> Tensor[]",
    f"all_gather(Tensor[] inputs, int dim, {_GROUPS}) -> Tensor[]",
    f"reduce_scatter(Tensor[] inputs, str kind, int dim, {_GROUPS}) -> Tensor[]",
    f"all_to_all(Tensor input, int split_dim, int concat_dim, {_GROUPS}) -> Tensor[]",
    f"broadcast(Tensor[] inputs, int root, {_GROUPS}) -> Tensor[]",
    "collective_permute(Tensor input, int[] pairs, Tensor? after) -> Tensor[]",
):
    _library.define(_schema)

operators: Final = torch.ops.xla_dist


def _nested(groups: Sequence[int], group_size: int) -> Groups:
    return tuple(
        tuple(groups[i : i + group_size]) for i in range(0, len(groups), group_size)
    )  # fmt: skip


# --- shapes -------------------------------------------------------------------------------------


def _order_meta() -> torch.Tensor:
    return torch.empty((), dtype=torch.int32, device="meta")


def _resized(name: str, x: torch.Tensor, dim: int, times: int = 1, by: int = 1) -> torch.Tensor:
    """A meta tensor like ``x`` whose size in dimension ``dim`` is multiplied by ``times`` and divided by ``by``.

    Raises IndexError if there is no such dimension, ValueError if it cannot be divided.
    """
    if not 0 <= dim < x.dim():
        raise IndexError(MSG_DIM.format(name=name, dim=dim, shape=tuple(x.shape)))
    shape = list(x.shape)
    if shape[dim] % by:
        raise ValueError(MSG_SPLIT.format(name=name, dim=dim, size=shape[dim], count=by))
    shape[dim] = shape[dim] * times // by
    return x.new_empty(shape)


def _same_shapes_meta(inputs: Operand, *_rest: object) -> list[torch.Tensor]:
    return [*(torch.empty_like(x) for x in inputs), _order_meta()]


def _all_gather_meta(
    inputs: Operand, dim: int, _groups: object, group_size: int, _after: object = None
) -> list[torch.Tensor]:
    return [*(_resized("all_gather", x, dim, times=group_size) for x in inputs), _order_meta()]


def _reduce_scatter_meta(
    inputs: Operand, _kind: str, dim: int, _groups: object, group_size: int, _after: object = None
) -> list[torch.Tensor]:
    return [*(_resized("reduce_scatter", x, dim, by=group_size) for x in inputs), _order_meta()]


def _all_to_all_meta(
    x: object, split: int, concat: int, _groups: object, group_size: int, _after: object = None
) -> list[torch.Tensor]:
    part = _resized("all_to_all", x, split, by=group_size)
    return [_resized("all_to_all", part, concat, times=group_size), _order_meta()]


def _permute_meta(x: object, *_rest: object) -> list[torch.Tensor]:
    return [torch.empty_like(x), _order_meta()]


# --- lowering -----------------------------------------------------------------------------------


class _Chain:
    """Runs the collectives of one operator one after the other; ``order`` is the order of the last.

    ``after`` is the order of the collective that was recorded before, or None.
    """

    def __init__(self, after: jax.Array | None) -> None:
        # the compiler does not know the replica's number either, so it can serve as the first order
        self.order = (
            primitives.replica()
            if after is None
            else jax.lax.bitcast_convert_type(after, jnp.uint32)
        )

    def run(self, collective: Callable[[jax.Array], jax.Array], operand: jax.Array) -> Operand:
        """``collective(operand)``, to run after the chain's earlier collectives."""
        result = collective(primitives.ordered(operand, self.order))
        self.order = primitives.order_of(result)
        return result

    def all_reduce(self, operands: Sequence[Operand], kind: str, groups: Groups) -> list[jax.Array]:
        """One reduction of operands of one dtype, to run after the chain's earlier collectives."""
        results = primitives.all_reduce(operands, kind, groups, self.order)
        self.order = primitives.order_of(results[-1])
        return results

    def with_order(self, results: Sequence[Operand]) -> list[jax.Array]:
        """The operator's results: ``results`` and the order of the last collective."""
        return [*results, jax.lax.bitcast_convert_type(self.order, jnp.int32)]


def _reduced(
    chain: _Chain, operands: Sequence[Operand], kind: str, groups: Groups
) -> list[jax.Array]:
    """The reductions of operands of any dtypes, with one collective for each dtype."""
    results: list[Operand] = [None] * len(operands)
    by_dtype: dict[object, list[int]] = {}
    for i, x in enumerate(operands):
        by_dtype.setdefault(x.dtype, []).append(i)
    for dtype, places in by_dtype.items():
        reduced = _reduced_of_dtype(chain, dtype, [operands[i] for i in places], kind, groups)
        for i, result in zip(places, reduced, strict=True):
            results[i] = result
    return results


def _reduced_of_dtype(
    chain: _Chain, dtype: object, xs: list[jax.Array], kind: str, groups: Groups
) -> list[jax.Array]:
    """The reductions of operands of one dtype."""
    if dtype == jnp.bool_:
        kind = "max" if kind in ("sum", "max", "or") else "min"
        results = chain.all_reduce([x.astype(jnp.uint8) for x in xs], kind, groups)
        return [r.astype(jnp.bool_) for r in results]
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return [_reduced_complex(chain, x, kind, groups) for x in xs]
    if kind in ("and", "or"):
        combine = jnp.bitwise_and if kind == "and" else jnp.bitwise_or
        return [combine.reduce(_stacked(chain, x, groups), axis=0) for x in xs]
    return chain.all_reduce(xs, kind, groups)


def _stacked(chain: _Chain, x: jax.Array, groups: Groups) -> jax.Array:
    """The values of the group's replicas, stacked along a new first dimension."""
    if not any(-1 in group for group in groups):
        return chain.run(lambda y: primitives.all_gather(y, 0, groups), x[None])
    # XLA gathers only in groups of one size, so this sums arrays in which each replica fills its own row
    bits = _bits(x)
    rows = jnp.zeros((len(groups[0]), *x.shape), bits.dtype).at[_position(groups)].set(bits)
    (summed,) = chain.all_reduce([rows], "sum", groups)
    return _from_bits(summed, x.dtype)


def _reduced_complex(chain: _Chain, x: jax.Array, kind: str, groups: Groups) -> jax.Array:
    if kind == "sum":
        return jax.lax.complex(*chain.all_reduce([x.real, x.imag], "sum", groups))
    return jnp.prod(
        jax.lax.complex(_stacked(chain, x.real, groups), _stacked(chain, x.imag, groups)), axis=0
    )


def _lower_all_reduce(
    inputs: Operand,
    kind: str,
    groups: Sequence[int],
    group_size: int,
    after: jax.Array | None = None,
) -> list[jax.Array]:
    chain = _Chain(after)
    return chain.with_order(_reduced(chain, inputs, kind, _nested(groups, group_size)))


def _lower_all_gather(
    inputs: Operand,
    dim: int,
    groups: Sequence[int],
    group_size: int,
    after: jax.Array | None = None,
) -> list[jax.Array]:
    chain = _Chain(after)
    nested = _nested(groups, group_size)
    return chain.with_order(
        [chain.run(lambda x: primitives.all_gather(x, dim, nested), x) for x in inputs]
    )


def _lower_reduce_scatter(
    inputs: Operand,
    kind: str,
    dim: int,
    groups: Sequence[int],
    group_size: int,
    after: jax.Array | None = None,
) -> list[jax.Array]:
    chain = _Chain(after)
    nested = _nested(groups, group_size)

    def scatter(x: jax.Array) -> jax.Array:
        if kind in ("sum", "min", "max") and x.dtype != jnp.bool_ and not jnp.iscomplexobj(x):
            return chain.run(lambda y: primitives.reduce_scatter(y, kind, dim, nested), x)
        (whole,) = _reduced(chain, [x], kind, nested)
        return _own_part(whole, dim, nested)

    return chain.with_order([scatter(x) for x in inputs])


def _position(groups: Groups) -> jax.Array:
    """This replica's position in its group, a uint32 scalar."""
    places = {r: i for group in groups for i, r in enumerate(group) if r >= 0}
    table = jnp.array([places[r] for r in sorted(places)], jnp.uint32)
    return table[primitives.replica()]


def _own_part(x: jax.Array, dim: int, groups: Groups) -> jax.Array:
    size = x.shape[dim] // len(groups[0])
    return jax.lax.dynamic_slice_in_dim(x, _position(groups) * size, size, dim)


def _lower_all_to_all(
    x: jax.Array,
    split: int,
    concat: int,
    groups: Sequence[int],
    group_size: int,
    after: jax.Array | None = None,
) -> list[jax.Array]:
    chain = _Chain(after)
    nested = _nested(groups, group_size)
    return chain.with_order(
        [chain.run(lambda x: primitives.all_to_all(x, split, concat, nested), x)]
    )


def _bits(x: jax.Array) -> jax.Array:
    """The bits of ``x`` as unsigned integers of at least 32 bits, whose sums with zeros are exact."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return bits.astype(jnp.uint32) if x.dtype.itemsize < 4 else bits


def _from_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    if dtype == jnp.bool_:
        return bits.astype(jnp.bool_)
    narrow = bits.astype(jnp.dtype(f"uint{8 * dtype.itemsize}"))
    return jax.lax.bitcast_convert_type(narrow, dtype)


def _lower_broadcast(
    inputs: Operand,
    root: int,
    groups: Sequence[int],
    group_size: int,
    after: jax.Array | None = None,
) -> list[jax.Array]:
    chain = _Chain(after)
    nested = _nested(groups, group_size)
    member = jnp.array([root in g for r in sorted(set(groups) - {-1}) for g in nested if r in g])
    here = primitives.replica()

    def spread(x: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(x):
            return jax.lax.complex(spread(x.real), spread(x.imag))
        bits = _bits(x)
        chosen = jnp.where(here == root, bits, jnp.zeros_like(bits))
        (summed,) = chain.all_reduce([chosen], "sum", nested)
        return jnp.where(member[here], _from_bits(summed, x.dtype), x)

    return chain.with_order([spread(x) for x in inputs])


def _lower_permute(
    x: jax.Array, pairs: Sequence[int], after: jax.Array | None = None
) -> list[jax.Array]:
    chain = _Chain(after)
    nested = _nested(pairs, 2)
    return chain.with_order([chain.run(lambda x: primitives.collective_permute(x, nested), x)])


def register() -> None:
    """Register the lowering rule and the meta kernel of each operator; called once."""
    for name, lowering, meta in (
        ("all_reduce", _lower_all_reduce, _same_shapes_meta),
        ("all_gather", _lower_all_gather, _all_gather_meta),
        ("reduce_scatter", _lower_reduce_scatter, _reduce_scatter_meta),
        ("all_to_all", _lower_all_to_all, _all_to_all_meta),
        ("broadcast", _lower_broadcast, _same_shapes_meta),
        ("collective_permute", _lower_permute, _permute_meta),
    ):
        rule(getattr(operators, name).default, meta=meta, all_replicas=True)(lowering)
