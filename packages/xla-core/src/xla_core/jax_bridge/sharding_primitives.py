"""How values are laid out over devices, said inside a program: primitives that jax has no public form of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from jax import Array

# jax 0.10.2: ShapedArray and Primitive are what an operation of one's own is made of.
from jax._src import core as _jax_core

# jax 0.10.2: registers lowerings, and builds custom calls.
from jax._src.interpreters import mlir as _mlir

# jaxlib 0.10.2: MLIR bindings; ``ir`` makes attributes.
from jaxlib.mlir import ir

# jaxlib 0.10.2: builders of StableHLO's operations.
from jaxlib.mlir.dialects import stablehlo

from xla_core.jax_bridge.passes.manual_constants import BEGINS, ENDS


def annotate_sharding(value: Array, text: str) -> Array:
    """``value``, laid out as the HLO sharding ``text`` says."""
    return _layout_p.bind(value, target="Sharding", text=text, shape=value.shape)


def to_manual(value: Array, shape: tuple[int, ...]) -> Array:
    """The part of ``value``, of ``shape``, that each device holds."""
    return _layout_p.bind(value, target=BEGINS, text="{manual}", shape=shape)


def from_manual(value: Array, text: str, shape: tuple[int, ...]) -> Array:
    """The value of ``shape`` whose parts, laid out as ``text`` says, each device gives."""
    part = annotate_sharding(value, "{manual}")
    return _layout_p.bind(part, target=ENDS, text=text, shape=shape)


def shard_alike(a: Array, b: Array, group: int) -> tuple[Array, Array]:
    """``a`` and ``b``, of one shape, split in the same way, which the compiler chooses.

    ``group`` is a number of their own in the program.
    """
    first, second = _alike_p.bind(a, b, group=group)
    return first, second


def _lower_layout(
    ctx: _mlir.LoweringRuleContext, value: Array, *, target: str, text: str, shape: tuple[int, ...]
) -> list[object]:
    # jax 0.10.2; XLA's older partitioner (GSPMD) knows these calls by name, passes.shardy_form rewrites them
    call = _mlir.custom_call(
        target,
        result_types=[_mlir.aval_to_ir_type(ctx.module_context, ctx.avals_out[0])],
        operands=[value],
        api_version=1,
        extra_attributes={"mhlo.sharding": ir.StringAttr.get(text)},
    )
    return [call.result]


# jax 0.10.2: jax's own constraint needs jax's devices, of which this process may have none
_layout_p: Final = _jax_core.Primitive("xla_layout")
_layout_p.def_abstract_eval(
    lambda aval, *, target, text, shape: _jax_core.ShapedArray(shape, aval.dtype)
)
_mlir.register_lowering(_layout_p, _lower_layout)


def _lower_alike(ctx: _mlir.LoweringRuleContext, *values: Array, group: int) -> list[object]:
    # jax 0.10.2; a call that may not be dropped, since the other one needs it
    text = {"mhlo.sharding": ir.StringAttr.get(f"{{unknown shard_as {group}}}")}
    calls = [
        _mlir.custom_call(
            "Sharding",
            result_types=[value.type],
            operands=[value],
            api_version=1,
            has_side_effect=True,
            extra_attributes=text,
        )
        for value in values
    ]
    return [call.result for call in calls]


_alike_p: Final = _jax_core.Primitive("xla_shard_alike")
_alike_p.multiple_results = True
_alike_p.def_abstract_eval(lambda a, b, *, group: (a, b))
_mlir.register_lowering(_alike_p, _lower_alike)


# -- collectives of parts --------------------------------------------------------------------------

Groups = tuple[tuple[int, ...], ...]

_COMBINE: Final[dict[str, Callable[..., object]]] = {
    "sum": stablehlo.add,
    "mul": stablehlo.multiply,
    "min": stablehlo.minimum,
    "max": stablehlo.maximum,
    "and": stablehlo.and_,
    "or": stablehlo.or_,
}
# XLA: a collective between the partitions of one program has a channel; device to device
_CHANNEL_KIND: Final = 1


def reduce_parts(value: Array, kind: str, groups: Groups, channel: int) -> Array:
    """Each device's part of ``value`` (see ``to_manual``) reduced over its group of devices; same shape.

    ``kind`` is the reduction (``sum``, ``max``, ...), ``groups`` are lists of device numbers, and ``channel``
    is a number of this collective's own in the program.
    """
    return _reduce_p.bind(value, kind=kind, groups=groups, axis=None, channel=channel)


def scatter_parts(value: Array, kind: str, groups: Groups, axis: int, channel: int) -> Array:
    """A device's slice along ``axis`` of ``reduce_parts(value, kind, groups, channel)``.

    Dimension ``axis`` is divided by the number of devices in a group.
    """
    return _reduce_p.bind(value, kind=kind, groups=groups, axis=axis, channel=channel)


def _reduced_aval(
    aval: _jax_core.ShapedArray, *, kind: str, groups: Groups, axis: int | None, channel: int
) -> object:
    shape = list(aval.shape)
    if axis is not None:
        shape[axis] //= len(groups[0])
    return _jax_core.ShapedArray(tuple(shape), aval.dtype)


def _lower_reduce(
    ctx: _mlir.LoweringRuleContext,
    value: Array,
    *,
    kind: str,
    groups: Groups,
    axis: int | None,
    channel: int,
) -> object:
    result = _mlir.aval_to_ir_type(ctx.module_context, ctx.avals_out[0])
    members = ir.DenseIntElementsAttr.get(np.array(groups, np.int64))
    options = {
        "channel_handle": stablehlo.ChannelHandle.get(channel, _CHANNEL_KIND),
        "use_global_device_ids": ir.BoolAttr.get(True),
    }
    if axis is None:
        operation = stablehlo.AllReduceOp([result], [value], members, **options)
    else:
        operation = stablehlo.ReduceScatterOp(result, value, axis, members, **options)
    operation.operation.attributes["mhlo.sharding"] = ir.StringAttr.get("{manual}")
    scalar = ir.RankedTensorType.get([], ir.RankedTensorType(value.type).element_type)
    block = operation.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        stablehlo.return_([_COMBINE[kind](*block.arguments)])
    return operation.results


_reduce_p: Final = _jax_core.Primitive("xla_reduce_parts")
_reduce_p.def_abstract_eval(_reduced_aval)
_mlir.register_lowering(_reduce_p, _lower_reduce)
