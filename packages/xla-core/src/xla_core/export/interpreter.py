"""Runs the graph of an exported program under jax, by the lowering rules of the lazy device."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from xla_core.export.symbols import Symbols
from xla_core.jax_bridge import custom_call_primitives
from xla_core.jax_bridge.traced_values import TracedValue
from xla_core.lowering.evaluate import random_key
from xla_core.operators.decompositions import lowerable
from xla_core.operators.fx_interpreter import GraphRun, is_getitem
from xla_core.operators.lowering_registry import Rule, find_multi_view, find_rule, find_view
from xla_core.operators.run_rule import LoweringError
from xla_core.recording import random_state
from xla_core.torch_bridge.dtypes import numpy_dtype
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands

MSG_UNSUPPORTED: Final = (
    "the model cannot be exported to StableHLO: there is no lowering for {operators}. Write the model "
    "without them, or pass the namespace of an operator of your own to "
    "StableHLOExportOptions(custom_ops_allowed_in_graph={{...}}) to export it as a custom_call"
)
MSG_FAILED: Final = "{target} cannot be lowered for operands {operands}: {kind}: {reason}"
MSG_FAILED_SYMBOLIC: Final = (
    "{target} cannot be lowered for operands {operands}, because its lowering needs the values of symbolic "
    "sizes: {reason}. Export with fixed sizes in these dimensions"
)
MSG_SYMBOLIC_CHOICE: Final = (
    "torch.cond depends on a size, {predicate}, but a program can have only one of its branches; export "
    "with fixed sizes"
)

_aten = torch.ops.aten
# Checks of values or sizes, which the exported program leaves out.
_CHECKS: Final = frozenset(
    {
        "aten::_assert_async", "aten::_assert_scalar", "aten::_assert_tensor_metadata",
        "aten::sym_constrain_range", "aten::sym_constrain_range_for_size",
    }
)  # fmt: skip
_SYMBOLIC: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _schema_name(node: Node) -> str:
    return node.target._schema.name if isinstance(node.target, OpOverload) else ""


def graphs_of(program: GraphModule) -> Iterator[GraphModule]:
    """A graph and all graphs that its higher-order operators call."""
    yield program
    for node in program.graph.nodes:
        if node.op == "get_attr":
            attribute = getattr(program, str(node.target))
            if isinstance(attribute, GraphModule):
                yield from graphs_of(attribute)


def unsupported_operators(program: GraphModule, custom: frozenset[str]) -> list[str]:
    """The operators of a program without a lowering, sorted; those in the namespaces ``custom`` need none."""
    names = {
        str(node.target)
        for graph in graphs_of(program)
        for node in graph.graph.nodes
        if node.op == "call_function" and not _supported(node, custom)
    }
    return sorted(names)


def _supported(node: Node, custom: frozenset[str]) -> bool:
    target = node.target
    if is_getitem(node) or isinstance(node.meta.get("val"), _SYMBOLIC):
        return True
    if isinstance(target, HigherOrderOperator):
        return target in _HIGHER_ORDER
    if not isinstance(target, OpOverload):
        return False
    if _schema_name(node) in _CHECKS or target.namespace in custom:
        return True
    return lowerable(target) or find_multi_view(target) is not None


def scalar_constants(program: GraphModule) -> dict[tuple[Node, int | str], np.ndarray]:
    """The numbers in a program's code, except 0 and 1, that rules take as arrays, by node and argument."""
    constants: dict[tuple[Node, int | str], np.ndarray] = {}
    for graph in graphs_of(program):
        for node in graph.graph.nodes:
            rule = find_rule(node.target) if isinstance(node.target, OpOverload) else None
            if rule is not None:
                constants |= {(node, place): np.asarray(a) for place, a in _lifted(node, rule)}
    return constants


def _lifted(node: Node, rule: Rule) -> Iterator[tuple[int | str, int | float]]:
    named: list[tuple[int | str, str, Operand]] = [
        (i, argument.name, a)
        for i, (argument, a) in enumerate(
            zip(node.target._schema.arguments, node.args, strict=False)  # type: ignore[union-attr]
        )
    ]
    named += [(name, name, a) for name, a in node.kwargs.items()]
    for place, name, a in named:
        if name in rule.lift and type(a) in (int, float) and a not in (0, 1):
            yield place, a


class ExportRun(GraphRun):
    """One run of an exported program's graph, whose sizes may be symbols.

    ``custom`` are the namespaces of operators that become custom calls. ``seeds`` are the seeds of random
    operators,
    ``scalars`` the numbers that are arguments of the program; other numbers stay in its code. ``scopes``, if given,
    collects the nodes by the names of their operations' scopes.
    """

    def __init__(
        self,
        symbols: Symbols,
        custom: frozenset[str],
        seeds: Mapping[Node, TracedValue],
        scalars: Mapping[tuple[Node, int | str], TracedValue],
        scopes: dict[str, Node] | None = None,
    ) -> None:
        super().__init__()
        self.symbols = symbols
        self.custom = custom
        self.seeds = seeds
        self.scalars = scalars
        self.scopes = scopes
        self.graph: GraphModule | None = None

    def run(self, graph: GraphModule, arrays: Sequence[jax.Array]) -> list[Operand]:
        """The flat list of the graph's results, for the values ``arrays`` of its placeholders."""
        self.graph = graph
        return super().run(graph, arrays)

    def branch(self, graph: GraphModule) -> Callable[..., list[Operand]]:
        """A function of arrays that runs ``graph``, which a higher-order operator calls."""

        def call(*arrays: jax.Array) -> list[Operand]:
            inner = ExportRun(self.symbols, self.custom, self.seeds, self.scalars, self.scopes)
            return inner.run(graph, arrays)

        return call

    def meta_of(self, value: Operand) -> object:
        """The shape and dtype of an example value, or a number of the same Python type for a symbolic number."""
        if isinstance(value, torch.Tensor):
            return self.symbols.meta(value)
        if isinstance(value, (list, tuple)):
            return [self.meta_of(item) for item in value]
        if isinstance(value, torch.SymInt):
            return 2
        return 0.5 if isinstance(value, torch.SymFloat) else value

    def random_key(self, node: Node) -> jax.Array:
        """The random key for the node's seed."""
        return random_key(jnp.asarray(self.seeds[node], np.int64))

    def arguments(self, node: Node) -> tuple[Operands, NamedOperands]:
        """The values of a node's arguments, with arrays for the numbers that are arguments of the program."""
        args, named = super().arguments(node)
        if not self.scalars:
            return args, named
        return (
            tuple(self.scalars.get((node, i), a) for i, a in enumerate(args)),
            {name: self.scalars.get((node, name), a) for name, a in named.items()},
        )

    def compute(self, node: Node) -> jax.Array:
        """The value of a node, or the list of its values. Raises LoweringError naming its operator."""
        if node.op == "get_attr":
            return getattr(self.graph, str(node.target))
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return self.symbols.dimension(value)
        if isinstance(value, torch.SymBool) or _schema_name(node) in _CHECKS:
            return value
        try:
            with jax.named_scope(self._scope(node)):
                return self._compute(node)
        except LoweringError:
            raise
        except Exception as error:
            raise self._failure(node, error) from error

    def _scope(self, node: Node) -> str:
        if self.scopes is None:
            return str(node.target)
        self.scopes[node.name] = node
        return f"{node.name}"

    def _compute(self, node: Node) -> jax.Array:
        target = node.target
        if isinstance(target, HigherOrderOperator):
            return _HIGHER_ORDER[target](self, *(self.value(a) for a in node.args))
        if isinstance(target, OpOverload):
            if target.namespace in self.custom:
                return self._custom_call(node)
            expand = find_multi_view(target)
            if expand is not None:
                return self._views(node, expand.expand)
            return super().compute(node)
        # arithmetic on sizes, such as a scale of 1 / sqrt(size)
        return _FLOATS.get(target, target)(*(self.value(a) for a in node.args))  # type: ignore[arg-type,operator]

    def _views(
        self, node: Node, expand: Callable[..., Sequence[tuple[OpOverload, tuple[object, ...]]]]
    ) -> list[jax.Array]:
        (base, *rest), named = self.arguments(node)
        parts = expand(self.meta(node.args[0]), *rest, **named)
        views = []
        for overload, args in parts:
            view = find_view(overload)
            assert view is not None
            views.append(view.get(base, *args))
        return views

    def _custom_call(self, node: Node) -> jax.Array:
        value = node.meta["val"]
        several = isinstance(value, (list, tuple))
        metas = [self.symbols.meta(v) for v in (value if several else [value])]
        tensors = [a for a in jax.tree.leaves(self.arguments(node)[0]) if isinstance(a, jax.Array)]
        results = custom_call_primitives.custom_call(
            str(node.target), tensors, [(m.shape, numpy_dtype(m.dtype)) for m in metas]
        )
        return results if several else results[0]

    def _failure(self, node: Node, error: Exception) -> LoweringError:
        operands = [self.meta(a) for a in node.args]
        if (
            isinstance(error, jax.errors.ConcretizationTypeError)
            or "InconclusiveDimension" in type(error).__name__
        ):
            text = MSG_FAILED_SYMBOLIC
        else:
            text = MSG_FAILED
        kind, reason = type(error).__name__, str(error).strip()
        return LoweringError(
            text.format(target=node.target, operands=operands, kind=kind, reason=reason)
        )


# -- operators that take graphs -------------------------------------------------------------------


def _inline(
    run: ExportRun, _setting: object, graph: GraphModule, *args: Operand
) -> list[jax.Array]:
    return run.branch(graph)(*args)


def _inline_autocast(
    run: ExportRun,
    _device: object,
    _dtype: object,
    _enabled: object,
    _cache: object,
    graph: GraphModule,
    *args: Operand,
) -> list[object]:
    return run.branch(graph)(*args)


def _cond(
    run: ExportRun,
    predicate: jax.Array,
    yes: GraphModule,
    no: GraphModule,
    operands: Sequence[Operand] = (),
) -> list[object]:
    if isinstance(predicate, torch.SymBool):
        raise ValueError(MSG_SYMBOLIC_CHOICE.format(predicate=predicate))
    # the predicate has one element, and any shape
    chosen = jnp.reshape(predicate, ())
    results: list[Operand] = jax.lax.cond(chosen, run.branch(yes), run.branch(no), *operands)
    return results


def _while_loop(
    run: ExportRun,
    condition: GraphModule,
    body: GraphModule,
    carried: Sequence[jax.Array],
    constant: Sequence[jax.Array] = (),
) -> list[object]:
    def goes_on(values: list[Operand]) -> jax.Array:
        return jnp.reshape(run.branch(condition)(*values, *constant)[0], ())

    def step(values: list[Operand]) -> list[jax.Array]:
        return run.branch(body)(*values, *constant)

    start = [jnp.asarray(value) for value in carried]
    results: list[Operand] = jax.lax.while_loop(goes_on, step, start)
    return results


_higher_order = torch.ops.higher_order
_HIGHER_ORDER: Final[Mapping[object, Callable[..., list[object]]]] = {
    getattr(_higher_order, name): function
    for name, function in (
        ("wrap_with_set_grad_enabled", _inline),
        ("wrap_with_autocast", _inline_autocast),
        ("cond", _cond),
        ("while_loop", _while_loop),
    )
    if hasattr(_higher_order, name)
}

_FLOATS: Final[Mapping[object, Callable[..., object]]] = {
    torch.sym_float: lambda a: jnp.asarray(a, np.float64),
    torch._sym_sqrt: lambda a: jnp.sqrt(jnp.asarray(a, np.float64)),
    operator.truediv: lambda a, b: jnp.asarray(a, np.float64) / b,
}


def draw_seeds(program: GraphModule) -> dict[Node, int]:
    """A seed for each random operator, drawn from the generator of the device ``xla:0``."""
    seeds = {}
    for graph in graphs_of(program):
        for node in graph.graph.nodes:
            rule = find_rule(node.target) if isinstance(node.target, OpOverload) else None
            if rule is not None and rule.random:
                seeds[node] = random_state.next_seed(0)
    return seeds
