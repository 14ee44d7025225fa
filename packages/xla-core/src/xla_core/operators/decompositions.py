"""PyTorch's decompositions as lowering rules: traced once per operand shapes, then interpreted."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from xla_core.operators.fx_interpreter import GraphRun, flat, is_getitem
from xla_core.operators.lowering_registry import find_multi_view, find_rule, find_view
from xla_core.operators.run_rule import STORAGE_ARGUMENTS
from xla_core.operators.tensor_meta import TensorMeta, tensor_meta
from xla_core.support import caches
from xla_core.torch_bridge.dtypes import NUMPY_DTYPES
from xla_core.torch_bridge.operands import NamedOperands, Operand


def has_decomposition(overload: OpOverload) -> bool:
    """Whether torch's table defines ``overload`` by other operators."""
    return overload in decomposition_table


def lowerable(overload: OpOverload) -> bool:
    """Whether ``overload`` has a rule that gives its value: its own, or as a view."""
    return find_rule(overload) is not None or find_view(overload) is not None


def _table() -> dict[object, object]:
    return {op: f for op, f in decomposition_table.items() if not lowerable(op)}


@caches.memoized("rules from outside, as a text", 1)
def _foreign(_count: int) -> frozenset[str]:
    """The files of the functions in torch's table."""
    codes = (getattr(inspect.unwrap(f), "__code__", None) for f in decomposition_table.values())
    return frozenset(code.co_filename for code in codes if code is not None)


def source_files() -> frozenset[str]:
    """The files of all decompositions, torch's and those that others registered."""
    return _foreign(len(decomposition_table))


class DecomposedRule:
    """The decomposition of one overload, as graphs of operators that have rules.

    ``lift`` is empty: a decomposition may branch on a scalar's value, so scalars stay constants.
    """

    lift: frozenset[str] = frozenset()
    random = False

    def __init__(self, overload: OpOverload) -> None:
        self.overload = overload
        self._graphs: dict[object, GraphModule | None] = {}

    def lowerable(self, args: Operand, kwargs: NamedOperands) -> bool:
        """Whether all operators of the decomposition for these operands have rules."""
        return self._graph(_metas_of(args), _metas_of(_relevant(kwargs))) is not None

    def run(
        self,
        args: Operand,
        kwargs: NamedOperands,
        arg_metas: tuple[object, ...],
        kwarg_metas: Mapping[str, object],
    ) -> list[Operand]:
        """The results for jax arrays ``args``; metas mirror them."""
        graph = self._graph(arg_metas, kwarg_metas)
        assert graph is not None
        arrays = [
            a for a, m in zip(flat(args), flat(arg_metas), strict=True) if isinstance(m, TensorMeta)
        ]
        named = [kwargs[k] for k, m in kwarg_metas.items() if isinstance(m, TensorMeta)]
        return GraphRun().run(graph, [*arrays, *named])

    def _graph(self, args: Operand, kwargs: Operand) -> GraphModule | None:
        key = (_freeze(args), _freeze(tuple(kwargs.items())))
        if key not in self._graphs:
            self._graphs[key] = _trace(self.overload, args, kwargs)
        return self._graphs[key]


def _relevant(kwargs: NamedOperands) -> dict[str, Operand]:
    return {k: v for k, v in kwargs.items() if k not in STORAGE_ARGUMENTS}


def _metas_of(a: Operand) -> Operand:
    if isinstance(a, torch.Tensor):
        return tensor_meta(tuple(a.shape), a.dtype)
    if isinstance(a, (list, tuple)):
        return [_metas_of(item) for item in a]
    if isinstance(a, dict):
        return {k: _metas_of(v) for k, v in a.items()}
    return a


def _freeze(a: Operand) -> Operand:
    if isinstance(a, (list, tuple)):
        return tuple(map(_freeze, a))
    if isinstance(a, (bool, int, float, complex)):
        return (type(a), repr(a))
    return a


def _trace(overload: OpOverload, args: Operand, kwargs: NamedOperands) -> GraphModule | None:
    """The graph for these operands, or None if it contains what has no rule."""
    tensors = [m for m in (*flat(args), *kwargs.values()) if isinstance(m, TensorMeta)]
    examples = [torch.empty(m.shape, dtype=m.dtype, device="meta") for m in tensors]

    def call(*given: torch.Tensor) -> Operand:
        remaining = iter(given)

        def fill(a: Operand) -> Operand:
            if isinstance(a, TensorMeta):
                return next(remaining)
            return [fill(item) for item in a] if isinstance(a, (list, tuple)) else a

        filled = [fill(a) for a in args]
        return decomposition_table[overload](*filled, **{k: fill(v) for k, v in kwargs.items()})

    try:
        functional = torch.func.functionalize(call, remove="mutations_and_views")
        with torch.no_grad():
            graph = make_fx(functional, decomposition_table=_table(), tracing_mode="fake")(
                *examples
            )
    except Exception:
        return None
    graph.graph.eliminate_dead_code()
    return graph if all(_supported(node) for node in graph.graph.nodes) else None


def _supported(node: Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function":
        return False
    target = node.target
    if is_getitem(node):
        return True
    return lowerable(target) and find_multi_view(target) is None and _known_dtypes(node)


def _known_dtypes(node: Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return all(v is None or v.dtype in NUMPY_DTYPES for v in values)
