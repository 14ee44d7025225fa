"""Runs FX graphs of operators with lowering rules on jax arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule, Node

from xla_core.operators.inlining import calls_of
from xla_core.operators.lowering_registry import find_rule, find_view
from xla_core.operators.run_rule import STORAGE_ARGUMENTS, conform, run_rule
from xla_core.operators.tensor_meta import tensor_meta
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands


def map_items(a: Operand, change: Callable[[object], object]) -> Operand:
    """``a`` with ``change`` applied to each item of its lists and tuples, which become lists."""
    return [map_items(item, change) for item in a] if isinstance(a, (list, tuple)) else change(a)


def flat(items: Operand) -> list[Operand]:
    """The items of nested lists and tuples, in order."""
    items_in_order: list[object] = []
    for item in items:
        items_in_order.extend(flat(item)) if isinstance(
            item, (list, tuple)
        ) else items_in_order.append(item)
    return items_in_order


def is_getitem(node: Node) -> bool:
    """Whether ``node`` takes one of several results."""
    return getattr(node.target, "__name__", "") == "getitem"


class GraphRun:
    """One run of a graph whose nodes carry example values under ``meta["val"]``."""

    def __init__(self) -> None:
        self.env: dict[Node, Operand] = {}

    def run(self, graph: GraphModule, arrays: Sequence[Operand]) -> list[Operand]:
        """The flat list of the graph's results for its placeholders' values ``arrays``."""
        remaining = iter(arrays)
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = next(remaining)
            elif node.op == "output":
                return [None if r is None else self.value(r) for r in flat(node.args)]
            elif is_getitem(node):
                self.env[node] = self.env[node.args[0]][node.args[1]]
            else:
                self.env[node] = self.compute(node)
        raise AssertionError("a graph without output")

    def value(self, a: Operand) -> Operand:
        """An argument with nodes replaced by their values."""
        return map_items(a, lambda item: self.env[item] if isinstance(item, Node) else item)

    def meta(self, a: Operand) -> Operand:
        """What type promotion looks at in an argument: metas for tensors."""
        return map_items(
            a, lambda item: self.meta_of(item.meta["val"]) if isinstance(item, Node) else item
        )

    def meta_of(self, value: Operand) -> Operand:
        """The metas of an example value; what is no tensor stays."""
        return map_items(
            value,
            lambda v: tensor_meta(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v,
        )

    def random_key(self, node: Node) -> Operand:
        """The jax PRNG key for a random operator. Raises LookupError: plain graphs have none."""
        raise LookupError(f"{node.target} draws random numbers, which needs a key")

    def compute(self, node: Node) -> Operand:
        """The value of a ``call_function`` node, or the list of its values."""
        args, kwargs = self.arguments(node)
        value = node.meta["val"]
        several = isinstance(value, (list, tuple))
        metas = self.meta_of(value if several else [value])
        view = find_view(node.target)  # type: ignore[arg-type]
        if view is not None:
            return conform(view.get(*args, **kwargs), metas[0], node.target)
        rule = find_rule(node.target)  # type: ignore[arg-type]
        if rule is None:
            raise LookupError(f"{node.target} has no lowering rule")
        key = self.random_key(node) if rule.random else None
        shown = tuple(self.meta(a) for a in node.args)
        with calls_of(rule):
            results = run_rule(rule, args, kwargs, shown, tuple(metas), key)
        return results if several else results[0]

    def arguments(self, node: Node) -> tuple[Operands, NamedOperands]:
        """The values of a node's arguments, without those that say where a result is stored."""
        args = tuple(self.value(a) for a in node.args)
        named = {k: self.value(v) for k, v in node.kwargs.items() if k not in STORAGE_ARGUMENTS}
        return args, named
