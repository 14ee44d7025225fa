"""Graphs of ``torch.compile`` that have lost which write comes before which read.

AOTAutograd replaces writes in place by new values, and copies those to the arguments at the end. For that
it has to know what shares memory with what. It sees neither how arguments that share a storage lie in it (``xla``
tensors all say that they are contiguous and begin at 0) nor what ``as_strided`` reaches outside of a view. Such a
graph is refused here; the backend ``openxla`` then runs Dynamo's graph, in which every operator is where the
user's function has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from xla_core.recording.xla_tensor import XLATensor
from xla_core.support import counters
from xla_core.torch_bridge import aot_graphs
from xla_core.torch_bridge.operands import Operand

MSG_SHARED: Final = (
    "the graph writes to argument {written}, which shares memory with argument {other}: which of its operators "
    "read before that write is not known; pass a .clone() of one of them, or take the view inside of the graph"
)
MSG_MERGED: Final = (
    "input {name} of the graph stands for several arguments that share memory, and it is not known how they lie "
    "in it; pass a .clone() of all but one of them, or take the views inside of the graph"
)
MSG_STRIDED: Final = (
    "{node} writes through as_strided() of a view, and what it writes outside of the view would be "
    "lost; call as_strided() of a tensor that is not a view, or .clone() on the view before it"
)


class LostOrderError(RuntimeError):
    """A graph that does not say what its writes in place change, for the arguments at hand."""


class LostOrderInGraphError(LostOrderError):
    """The same, for all arguments."""


def prepare() -> None:
    """Let ``torch.compile(backend="openxla")`` run what is refused here without AOTAutograd."""
    aot_graphs.run_plainly_after(LostOrderError, LostOrderInGraphError, _plain_run)


def _plain_run() -> None:
    counters.increment("DynamoGraphRecordedAgain")


def check_graph(model: object) -> None:
    """Raise LostOrderInGraphError for a graph that is wrong for all arguments."""
    if not isinstance(model, fx.GraphModule):
        return
    for name in aot_graphs.merged_arguments(model):
        raise LostOrderInGraphError(MSG_MERGED.format(name=name))
    for node in model.graph.nodes:
        if node.target is torch.ops.aten.as_strided_scatter.default and _is_view(node.args[0]):
            raise LostOrderInGraphError(MSG_STRIDED.format(node=_place(node)))


def _is_view(value: Operand) -> bool:
    return (
        isinstance(value, fx.Node) and isinstance(value.target, OpOverload) and value.target.is_view
    )


def _place(node: fx.Node) -> str:
    """The line of the user's program that a node comes from, or the node's name."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    return next((line for line in reversed(lines) if line.startswith("File ")), node.name)


def written_arguments(model: object) -> frozenset[int]:
    """The positions of arguments to which a graph, or the caller of it, writes by an operator of its own.

    Writes through views are not among them: AOTAutograd's graphs have none.
    """
    if not isinstance(model, fx.GraphModule):
        return frozenset()
    inputs = [n for n in model.graph.nodes if n.op == "placeholder"]
    after = aot_graphs.written_after(model)
    within = {target for node in model.graph.nodes for target in _targets(node)}
    return frozenset(
        position
        for position, node in enumerate(inputs)
        if node in within or (after and node.meta.get("desc") in after)
    )


def _targets(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that a node writes to."""
    if not isinstance(node.target, OpOverload):
        return
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (v for v in pytree.tree_leaves(value) if isinstance(v, fx.Node))


def check_arguments(args: Sequence[Operand], written: Iterable[int]) -> None:
    """Raise LostOrderError where an argument that is written to shares its storage with another one."""
    first: dict[int, int] = {}
    shared: dict[int, tuple[int, int]] = {}
    for position, a in enumerate(args):
        if isinstance(a, XLATensor):
            other = first.setdefault(id(a._s), position)
            if other != position:
                shared[id(a._s)] = (other, position)
    if not shared:
        return
    for number in written:
        a = args[number]
        if isinstance(a, XLATensor) and id(a._s) in shared:
            one, two = shared[id(a._s)]
            other = two if number == one else one
            raise LostOrderError(MSG_SHARED.format(written=number, other=other))
