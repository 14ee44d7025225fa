"""How much one run of a program costs, as its StableHLO tells: for clients that compile by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

# jaxlib 0.10.2: MLIR bindings
from jaxlib.mlir import ir

# jaxlib 0.10.2: attributes of StableHLO operations
from jaxlib.mlir.dialects import stablehlo as _stablehlo


class Weights(NamedTuple):
    """What the parts of a program cost on a device, in units of its own."""

    element: float = 1.0
    """An element of a value that is computed; of what is read, where that is more."""
    transcendental: float = 0.0
    """Beside that, an element of ``exp``, ``tanh`` and the like."""
    indexed: float = 0.0
    """Beside that, an element that is gathered or scattered."""
    comparison: float = 0.0
    """Of a sort; there are n log2(n)."""
    flop: float = 0.0
    """A multiplication or an addition of a product or a convolution."""


class Work(NamedTuple):
    """What one run costs, and the number of operations that there are to compile."""

    cost: float
    operations: int


def estimate(module: ir.Module | None, weights: Weights, most: float) -> Work | None:
    """The work of a program; None if it costs more than ``most``, or is not known, as that of no module.

    What is inside a loop counts with each iteration, what is inside a function with each call. Nobody
    knows where a loop runs until some value decides, and where a dimension has no size. This takes 5
    microseconds for each operation, up to where the cost is more than ``most``.
    """
    if module is None:
        return None
    with module.context:
        try:
            return _Count(module, weights, most).work()
        except (ir.MLIRError, ValueError, KeyError):
            return None


class _TooMuchError(ValueError):
    """The program costs more than the caller's limit, or its cost is not known."""


class _Count:
    """Adds up the functions of a module."""

    def __init__(self, module: ir.Module, weights: Weights, most: float) -> None:
        self._weights = weights
        self._most = most
        self._operations = 0
        self._module = module  # its operations do not keep it alive
        self._functions = {
            ir.StringAttr(o.attributes["sym_name"]).value: o
            for o in module.body.operations
            if "sym_name" in o.attributes
        }
        self._known: dict[str, float] = {}

    def work(self) -> Work:
        """That of the function ``main``."""
        cost = self._function("main")
        return Work(cost, self._operations)

    def _function(self, name: str) -> float:
        cost = self._known.get(name)
        if cost is None:
            self._known[name] = cost = self._region(self._functions[name].regions[0])
        return cost

    def _region(self, region: ir.Region) -> float:
        cost = 0.0
        for block in region.blocks:
            for wrapped in block.operations:
                self._operations += 1
                operation = wrapped.operation
                name = operation.name
                if name not in _FREE:
                    nested = _NESTED.get(name)
                    cost += (
                        _single(name, operation, self._weights)
                        if nested is None
                        else nested(self, operation)
                    )
                    if cost > self._most:
                        raise _TooMuchError
        return cost

    def _called(self, operation: ir.Operation) -> float:
        return self._function(ir.FlatSymbolRefAttr(operation.attributes["callee"]).value)

    def _composite(self, operation: ir.Operation) -> float:
        return self._function(ir.FlatSymbolRefAttr(operation.attributes["decomposition"]).value)

    def _loop(self, operation: ir.Operation) -> float:
        times = _iterations(operation)
        if times is None:
            raise _TooMuchError
        return times * self._region(operation.regions[1])

    def _branches(self, operation: ir.Operation) -> float:
        return max(map(self._region, operation.regions))


_NESTED: Final[Mapping[str, Callable[[_Count, Any], float]]] = {
    "func.call": _Count._called,
    "stablehlo.composite": _Count._composite,
    "stablehlo.while": _Count._loop,
    "stablehlo.case": _Count._branches,
    "stablehlo.if": _Count._branches,
}
_FREE: Final = frozenset({
    "func.return", "stablehlo.return", "stablehlo.constant", "stablehlo.reshape", "stablehlo.tuple",
    "stablehlo.get_tuple_element", "stablehlo.bitcast_convert", "stablehlo.optimization_barrier",
    "stablehlo.create_token", "stablehlo.after_all", "stablehlo.partition_id", "stablehlo.replica_id",
})  # fmt: skip
_TRANSCENDENTAL: Final = frozenset({
    *(
        f"stablehlo.{name}"
        for name in (
            "atan2", "cbrt", "cosine", "exponential", "exponential_minus_one", "log", "log_plus_one",
            "logistic", "power", "sine", "tan", "tanh",
        )
    ),
})  # fmt: skip
_INDEXED: Final = frozenset({"stablehlo.gather", "stablehlo.scatter"})
# others (VHLO, which stored programs are in) are none that a client compiles as they are
_KNOWN: Final = ("stablehlo.", "chlo.", "sdy.")
# functions of mathematics, which become a dozen operations each
_MATHEMATICS: Final = "chlo."


def _single(name: str, operation: ir.Operation, weights: Weights) -> float:
    """The cost of an operation that calls no other computation."""
    operands, results = ([_shape(v) for v in vs] for vs in (operation.operands, operation.results))
    if not name.startswith(_KNOWN):
        raise _TooMuchError
    # what reads more than it writes costs what it reads; slices and gathers read what they write
    counted = [*operands, *results] if name in _READERS else results
    size = max(map(math.prod, counted), default=0)
    cost = size * weights.element
    if name in _TRANSCENDENTAL or name.startswith(_MATHEMATICS):
        cost += size * weights.transcendental
    elif name in _INDEXED:
        cost += size * weights.indexed
    elif name == "stablehlo.sort":
        cost += size * math.log2(max(2, size)) * weights.comparison
    elif name in _WINDOWED:
        # long windows are computed in steps
        cost += size * min(64, _window(operation)) * weights.element
    elif name in _ARITHMETIC:
        cost += _ARITHMETIC[name](operation, operands) * math.prod(results[0]) * weights.flop
    return cost


_READERS: Final = frozenset({
    "stablehlo.reduce", "stablehlo.reduce_window", "stablehlo.select_and_scatter", "stablehlo.sort",
    "stablehlo.scatter", "stablehlo.custom_call", "stablehlo.cholesky", "stablehlo.fft",
    "stablehlo.triangular_solve",
})  # fmt: skip

_WINDOWED: Final = frozenset({"stablehlo.reduce_window", "stablehlo.select_and_scatter"})

Shape = tuple[int, ...]


def _shape(value: ir.Value) -> Shape:
    """The sizes of a value's dimensions, none for what is no tensor. ValueError where one is not known."""
    kind = value.type
    if not isinstance(kind, ir.RankedTensorType):
        return ()
    if not kind.has_static_shape:
        raise _TooMuchError
    return tuple(kind.shape)


def _iterations(loop: ir.Operation) -> int | None:
    """How often a loop runs that counts up from one constant to another; None for any other loop."""
    condition, body = (region.blocks[0] for region in loop.regions)
    returned = _operation(condition.operations[len(condition.operations) - 1].operands[0])
    if returned is None or returned.name != "stablehlo.compare":
        return None
    if "LT" not in str(returned.attributes["comparison_direction"]):
        return None
    counter, limit = returned.operands
    if not isinstance(counter.owner, ir.Block):
        return None
    number = ir.BlockArgument(counter).arg_number
    last, first = _constant(limit), _constant(loop.operands[number])
    step = _step(body.operations[len(body.operations) - 1].operands[number], number)
    if last is None or first is None or step is None:
        return None
    return max(0, -(-(last - first) // step))


def _step(value: ir.Value, number: int) -> int | None:
    """What is added to a block's argument to give ``value``, if it is at least 1."""
    added = _operation(value)
    if added is None or added.name != "stablehlo.add":
        return None
    counter, step = added.operands
    if not isinstance(counter.owner, ir.Block) or ir.BlockArgument(counter).arg_number != number:
        return None
    number_added = _constant(step)
    return number_added if number_added is not None and number_added > 0 else None


def _operation(value: ir.Value) -> ir.Operation:
    """The operation that gives a value; None for an argument of a block."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def _constant(value: ir.Value) -> int | None:
    operation = _operation(value)
    if operation is None or operation.name != "stablehlo.constant":
        return None
    number = ir.DenseIntElementsAttr(operation.attributes["value"])
    return int(number[0]) if len(number) == 1 else None


def _product(operation: ir.Operation, operands: list[Shape]) -> float:
    numbers = _stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    return 2.0 * math.prod(operands[0][d] for d in numbers.lhs_contracting_dimensions)


def _convolution(operation: ir.Operation, operands: list[Shape]) -> float:
    # all elements of the kernel but those of other output features
    numbers = _stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    kernel = operands[1]
    return 2.0 * math.prod(kernel) / max(1, kernel[numbers.kernel_output_feature_dimension])


def _cubic(_: object, operands: list[Shape]) -> float:
    return float(operands[0][-1])


def _window(operation: ir.Operation) -> int:
    return math.prod(ir.DenseI64ArrayAttr(operation.attributes["window_dimensions"]))


# multiplications and additions for each element of the result
_ARITHMETIC: Final[Mapping[str, Callable[[object, list[Shape]], float]]] = {
    "stablehlo.dot_general": _product,
    "stablehlo.convolution": _convolution,
    "stablehlo.cholesky": _cubic,
    "stablehlo.triangular_solve": _cubic,
}
