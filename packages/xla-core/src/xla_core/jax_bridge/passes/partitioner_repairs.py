"""Partitioned programs: what XLA's partitioner gets wrong where devices hold unequal parts or windows overlap.

All of it was seen with jaxlib 0.10.2 (one transform with 0.12 only), most of it gives wrong numbers without a word.

It keeps the window of a value that each device needs (a cumulative sum's, a pooling's, what a pad
moves) for the next operation with such a window, whatever follows the value's end in either: zeros in
the one, ones or infinities in the other. Values that need another filling than zeros go through a barrier
of their own, so that nothing is kept of them for others.

A pad that puts elements between those of a value comes out wrong, or does not compile; with a dimension more
they are elements behind others. One that cuts elements off does it as a slice.

A scatter whose updates do not divide into equal parts adds what lies behind the last update as well.
The updates are filled up to a number that divides, with indices that lead nowhere.

A convolution with a dimension that windows move along split comes out wrong, or ends the process, for most
ways to split its other operand, its result, or for parts that several devices hold. These dimensions are whole
there; batch and features stay split as they are. One whose batch is in groups (the gradient of a
grouped kernel) is computed whole by every device: it comes out wrong whatever is split.

A Fourier transform over a dimension that is split ends the process, or raises. Such dimensions are whole there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

# jaxlib 0.10.2: MLIR bindings; ``ir`` edits modules.
from jaxlib.mlir import ir

# jaxlib 0.10.2: builders of Shardy's and StableHLO's operations.
from jaxlib.mlir.dialects import sdy, stablehlo

from xla_core.jax_bridge.module_attributes import all_operations
from xla_core.jax_bridge.passes import manual_constants

_ZEROS: Final = "zeros"


def correct(module: ir.Module, num_partitions: int) -> None:
    """Rewrite what the partitioner would get wrong; other programs stay as they are."""
    with module.context, ir.Location.unknown():
        for operation in list(all_operations(module.body)):
            if operation.name == "stablehlo.scatter":
                _fill_scatter(operation, num_partitions)
            elif operation.name == "stablehlo.pad":
                _simplify_pad(operation)
        _keep_whole(module)
        _separate_windows(list(all_operations(module.body)))


# --- windows ------------------------------------------------------------------------------------


def _separate_windows(operations: list[ir.Operation]) -> None:
    """Let operations whose windows are filled with different values read different values."""
    fillings = [(o, i, f) for o in operations for i, f in _fillings(o)]
    if len({key for *_, (key, _) in fillings}) < 2:
        return
    for operation, index, (key, value) in fillings:
        if key != _ZEROS:
            # with the filling beside it no two barriers are equal, or XLA would merge them
            kept = [operation.operands[index], *([] if value is None else [value])]
            with ir.InsertionPoint(operation):
                barrier = ir.Operation.create(
                    "stablehlo.optimization_barrier", [v.type for v in kept], kept
                )
            operation.operands[index] = barrier.results[0]


def _fillings(operation: ir.Operation) -> list[tuple[int, tuple[str, ir.Value]]]:
    """The operands that an operation has windows of, and what they are filled with: a key, and the value."""
    operands = operation.operands
    match operation.name:
        case "stablehlo.pad":
            return [(0, _filling(operands[1]))]
        case "stablehlo.reduce_window":
            half = len(operands) // 2
            return [(i, _filling(operands[half + i])) for i in range(half)]
        case "stablehlo.select_and_scatter":
            # the largest (or smallest) number there is, so that no element outside is selected
            return [(0, ("selected", None)), (1, _filling(operands[2]))]
        case "stablehlo.convolution":
            return [(0, (_ZEROS, None)), (1, (_ZEROS, None))]
    return []


def _filling(value: ir.Value) -> tuple[str, object]:
    constant = value.owner
    while (
        isinstance(constant, ir.OpView | ir.Operation) and constant.operation.name in _SAME_NUMBER
    ):
        constant = constant.operation.operands[0].owner
    if not isinstance(constant, ir.OpView | ir.Operation):
        return f"value {hash(value)}", value
    if constant.operation.name != "stablehlo.constant":
        return f"value {hash(value)}", value
    attribute = ir.DenseElementsAttr(constant.operation.attributes["value"])
    text = str(attribute.get_splat_value()) if attribute.is_splat else str(attribute)
    number = text.partition(" : ")[0]
    return (_ZEROS if number in _NOUGHTS else number), value


_SAME_NUMBER: Final = ("stablehlo.broadcast_in_dim", "stablehlo.reshape")
_NOUGHTS: Final = ("0", "0.000000e+00", "false")


# --- pads ---------------------------------------------------------------------------------------


def _simplify_pad(operation: ir.Operation) -> None:
    """Let a pad only add elements in front of and behind those of its operand."""
    low, high, between = (
        list(ir.DenseI64ArrayAttr(operation.attributes[name]))
        for name in ("edge_padding_low", "edge_padding_high", "interior_padding")
    )
    value, filling = operation.operands
    shape = list(ir.RankedTensorType(value.type).shape)
    between = [k if n > 1 else 0 for k, n in zip(between, shape, strict=True)]
    if not any(between) and min([0, *low, *high]) == 0:
        return
    with ir.InsertionPoint(operation):
        if any(between):
            value = _spread(value, shape, between, filling)
            high = [h - k for h, k in zip(high, between, strict=True)]
            shape = [n * (k + 1) for n, k in zip(shape, between, strict=True)]
        if min([0, *low, *high]) < 0:
            starts = [max(-n, 0) for n in low]
            ends = [n - max(-h, 0) for n, h in zip(shape, high, strict=True)]
            value = _slice(value, starts, ends)
        edges = [max(n, 0) for n in low], [max(n, 0) for n in high]
        padded = _pad(value, filling, *edges)
    operation.results[0].replace_all_uses_with(padded)
    operation.erase()


def _spread(value: ir.Value, shape: list[int], between: list[int], filling: ir.Value) -> ir.Value:
    """``value`` with the given number of fillings behind each of its elements, along each dimension."""
    element = ir.RankedTensorType(value.type).element_type
    apart = [size for n, k in zip(shape, between, strict=True) for size in ((n, 1) if k else (n,))]
    high = [more for k in between for more in ((0, k) if k else (0,))]
    value = _reshape(value, apart, element)
    value = _pad(value, filling, [0] * len(high), high)
    return _reshape(value, [n * (k + 1) for n, k in zip(shape, between, strict=True)], element)


def _reshape(value: ir.Value, shape: list[int], element: ir.Type) -> ir.Value:
    kind = ir.RankedTensorType.get(shape, element)
    return ir.Operation.create("stablehlo.reshape", [kind], [value]).results[0]


def _slice(value: ir.Value, starts: list[int], ends: list[int]) -> ir.Value:
    element = ir.RankedTensorType(value.type).element_type
    kind = ir.RankedTensorType.get(
        [end - start for start, end in zip(starts, ends, strict=True)], element
    )
    attributes = {
        "start_indices": ir.DenseI64ArrayAttr.get(starts),
        "limit_indices": ir.DenseI64ArrayAttr.get(ends),
        "strides": ir.DenseI64ArrayAttr.get([1] * len(starts)),
    }
    return ir.Operation.create("stablehlo.slice", [kind], [value], attributes).results[0]


def _pad(value: ir.Value, filling: ir.Value, low: list[int], high: list[int]) -> ir.Value:
    """``value`` with the given numbers of fillings in front of it and behind it; itself if all of them are 0."""
    if not any(low) and not any(high):
        return value
    kind = ir.RankedTensorType(value.type)
    shape = [a + n + b for a, n, b in zip(low, kind.shape, high, strict=True)]
    attributes = {
        "edge_padding_low": ir.DenseI64ArrayAttr.get(low),
        "edge_padding_high": ir.DenseI64ArrayAttr.get(high),
        "interior_padding": ir.DenseI64ArrayAttr.get([0] * kind.rank),
    }
    result = ir.RankedTensorType.get(shape, kind.element_type)
    return ir.Operation.create("stablehlo.pad", [result], [value, filling], attributes).results[0]


# --- scatters -----------------------------------------------------------------------------------


def _fill_scatter(operation: ir.Operation, count: int) -> None:
    """Let the numbers of updates of a scatter divide by ``count``, the new ones leading nowhere."""
    numbers = stablehlo.ScatterDimensionNumbers(operation.attributes["scatter_dimension_numbers"])
    if numbers.scatter_indices_batching_dims:
        return
    inputs = (len(operation.operands) - 1) // 2
    indices = operation.operands[inputs]
    shape = list(ir.RankedTensorType(indices.type).shape)
    batch = [i for i in range(len(shape)) if i != numbers.index_vector_dim]
    more = {i: -shape[i] % count for i in batch if shape[i] > 1}
    if not any(more.values()):
        return
    windows = set(numbers.update_window_dims)
    with ir.InsertionPoint(operation):
        operation.operands[inputs] = _padded(indices, more, nowhere=True)
        for i in range(inputs + 1, len(operation.operands)):
            update = operation.operands[i]
            rank = ir.RankedTensorType(update.type).rank
            places = [d for d in range(rank) if d not in windows]
            own = {d: more.get(b, 0) for d, b in zip(places, batch, strict=True)}
            operation.operands[i] = _padded(update, own, nowhere=False)


def _padded(value: ir.Value, more: dict[int, int], *, nowhere: bool) -> ir.Value:
    """``value`` with the given number of elements added at the end of each dimension: zeros, or invalid indices."""
    kind = ir.RankedTensorType(value.type)
    scalar = ir.RankedTensorType.get((), kind.element_type)
    filling = ir.Operation.create(
        "stablehlo.constant", [scalar], attributes={"value": _constant(scalar, nowhere)}
    ).results[0]
    return _pad(value, filling, [0] * kind.rank, [more.get(d, 0) for d in range(kind.rank)])


def _constant(scalar: ir.Value, nowhere: bool) -> ir.Value:
    number = "0"
    element = str(scalar.element_type)
    if nowhere:
        # the largest number, past the end of any dimension; indices that are in order stay so
        unsigned = element.startswith("ui")
        bits = int(element.removeprefix("u").removeprefix("i"))
        number = str(2 ** (bits - (not unsigned)) - 1)
    elif element == "i1":
        number = "false"
    elif element.startswith("complex"):
        number = "(0.0, 0.0)"
    elif not element.startswith(("i", "ui")):
        number = "0.0"
    return ir.Attribute.parse(f"dense<{number}> : {scalar}")


# --- convolutions and Fourier transforms --------------------------------------------------------


def _keep_whole(module: ir.Module) -> None:
    """Let every dimension be whole on each device that windows move along, or that is transformed."""
    operations = [o for o in all_operations(module.body) if o.name in _WHOLE]
    if not operations:
        return
    mesh = _shardy_mesh(module)
    parts = manual_constants.computed_on_parts(module)
    for operation in operations:
        if hash(operation) not in parts:
            _unsplit(operation, _WHOLE[operation.name](operation), mesh)


def _convolved(operation: ir.Operation) -> list[Sequence[int]]:
    """The dimensions of inputs, kernel and result that the window of a convolution moves along."""
    numbers = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    if ir.IntegerAttr(operation.attributes["batch_group_count"]).value > 1:
        return [range(ir.RankedTensorType(operation.results[0].type).rank)] * 3
    return [
        numbers.input_spatial_dimensions,
        numbers.kernel_spatial_dimensions,
        numbers.output_spatial_dimensions,
    ]


def _transformed(operation: ir.Operation) -> list[Sequence[int]]:
    """The dimensions of a Fourier transform's operand and result that it is over: the last ones."""
    rank = ir.RankedTensorType(operation.results[0].type).rank
    count = len(ir.DenseI64ArrayAttr(operation.attributes["fft_length"]))
    return [range(rank - count, rank)] * 2


# For each operand, and at the end for the result.
_WHOLE: Final = {"stablehlo.convolution": _convolved, "stablehlo.fft": _transformed}


def _unsplit(operation: ir.Operation, whole: list[Sequence[int]], mesh: object) -> None:
    result = operation.results[0]
    with ir.InsertionPoint(operation):
        for index, dimensions in enumerate(whole[:-1]):
            operation.operands[index] = _with_whole(operation.operands[index], dimensions, mesh)
    with ir.InsertionPoint.after(operation):
        _use(lambda: _with_whole(result, whole[-1], mesh), result)


def _use(make: Callable[[], object], former: ir.Operation) -> None:
    """Let those who use ``former`` now use what ``make()`` makes of it."""
    uses = [(use.owner, use.operand_number) for use in former.uses]
    replacement = make()
    for user, index in uses:
        user.operands[index] = replacement


def _with_whole(value: ir.Value, whole: Sequence[int], mesh: object) -> ir.Value:
    """``value`` with the dimensions ``whole`` unsplit, the others split as the partitioner likes."""
    rank = ir.RankedTensorType(value.type).rank
    if mesh is not None:
        dimensions = [sdy.DimensionShardingAttr.get([], d in whole) for d in range(rank)]
        return sdy.ShardingConstraintOp(value, sdy.TensorShardingAttr.get(mesh, dimensions)).result
    free = ",".join(str(d) for d in range(rank) if d not in whole)
    attributes = {
        "call_target_name": ir.StringAttr.get("Sharding"),
        "mhlo.sharding": ir.StringAttr.get("{replicated}"),
        # as jax 0.10.2 writes dimensions that are left to the partitioner
        "backend_config": ir.StringAttr.get(f"unspecified_dims=[{free}]" if free else ""),
    }
    return ir.Operation.create("stablehlo.custom_call", [value.type], [value], attributes).results[
        0
    ]


def _shardy_mesh(module: ir.Module) -> object:
    """The mesh that the module's shardings name, None if none is written for Shardy."""
    for operation in all_operations(module.body):
        if operation.name == "sdy.sharding_constraint":
            return sdy.TensorShardingAttr(operation.attributes["sharding"]).mesh_or_ref
        for name in ("arg_attrs", "res_attrs"):
            if operation.name == "func.func" and name in operation.attributes:
                for entry in ir.ArrayAttr(operation.attributes[name]):
                    values = ir.DictAttr(entry)
                    if "sdy.sharding" in values:
                        return sdy.TensorShardingAttr(values["sdy.sharding"]).mesh_or_ref
    return None


def lay_out_transforms(module: ir.Module) -> None:
    """Let values lie row by row before and after Fourier transforms, as the CPU's computes them.

    Next to a collective it gets another order, and refuses to run. With jaxlib 0.12 so it does where the use of its
    result splits it in another way than its operand, unevenly: parts are exchanged behind the order that is
    given here. Its operand alone says how it is split.
    """
    transforms = [o for o in all_operations(module.body) if o.name == "stablehlo.fft"]
    with module.context, ir.Location.unknown():
        sharded = _shardy_mesh(module) is not None
        for operation in transforms:
            with ir.InsertionPoint(operation):
                operation.operands[0] = _in_rows(operation.operands[0])
            with ir.InsertionPoint.after(operation):
                _use(
                    functools.partial(_laid_out, operation.results[0], sharded),
                    operation.results[0],
                )


def _laid_out(value: ir.Value, sharded: bool) -> object:
    """``value`` row by row; where Shardy splits it, the shardings of its users do not reach back to it."""
    value = _in_rows(value)
    if not sharded:
        return value
    return sdy.PropagationBarrierOp(value, sdy.PropagationDirection.FORWARD).result


def _in_rows(value: ir.Value) -> object:
    """``value``, with the elements of its last dimension side by side in memory."""
    order = ir.DenseIntElementsAttr.get(
        np.arange(ir.RankedTensorType(value.type).rank)[::-1].astype(np.int64),
        type=ir.IndexType.get(),
    )
    attributes = {
        "call_target_name": ir.StringAttr.get("LayoutConstraint"),
        "operand_layouts": ir.ArrayAttr.get([order]),
        "result_layouts": ir.ArrayAttr.get([order]),
    }
    return ir.Operation.create("stablehlo.custom_call", [value.type], [value], attributes).results[
        0
    ]
