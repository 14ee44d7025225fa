"""Decides which values of a forward pass are saved for the backward pass, and which are computed again.

By default views and constants are computed again, as they cost nothing, and all other values are saved. Another
``partition_fn`` is one of functorch's (``min_cut_rematerialization_partition``): it gets the two passes as an FX
graph of PyTorch's operators, and the values that its forward graph returns are saved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch
from functorch.compile import default_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from xla_core.computations.body_recorder import Body
from xla_core.operators.lowering_registry import ViewRule
from xla_core.operators.plan import SEED
from xla_core.operators.schema import pure_form
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Entry, Operation, inputs_of, operations_of
from xla_core.recording.step_key import Lift, Ref

PartitionFn: TypeAlias = Callable[..., tuple[GraphModule, GraphModule]]
Keep: TypeAlias = Callable[[Operation, int], bool]
"""Whether a value of an operation of the forward pass, by its number, is saved for the backward pass."""

MSG_UNKNOWN: Final = (
    "partition_fn keeps {name!r}, which the recorded function does not compute: it may choose which values "
    "are kept, but not change the operators"
)


def keep_rule(
    body: Body,
    cut: int,
    outputs: Sequence[int],
    gradients: Sequence[int],
    tangents: Sequence[int | None],
    partition_fn: PartitionFn | None,
) -> Keep:
    """The rule of ``partition_fn`` (None: the default); random numbers are always saved."""
    if not gradients or partition_fn in (None, default_partition):
        free = _free(body, cut)
        return lambda _entry, vid: vid not in free
    chosen = _chosen(body, outputs, gradients, tangents, partition_fn)
    return lambda operation, vid: vid in chosen or SEED in operation.kwargs


def _free(body: Body, cut: int) -> set[int]:
    """The values that need not be saved: constants, and views of values that are saved or computed anyway."""
    free: set[int] = set()
    given = {v for v, source in body.inputs.items()}
    for entry in operations_of(body.entries[:cut]):
        plan = entry.plan
        if len(entry.metas) != 1 or SEED in entry.kwargs:
            continue
        reads = [ref.vid for ref in entry.references()]
        view = isinstance(plan.rule, ViewRule) and not plan.is_put and len(reads) == 1
        constant = not reads and not any(entry.lifted())
        if constant or (view and _is_as_large(body, entry, reads[0], given | free)):
            free.add(entry.first)
    return free


def _is_as_large(body: Body, entry: Entry, base: int, kept: set[int]) -> bool:
    """Whether saving the base of a view takes no more memory than saving the view."""
    return base in kept or body.meta(base).nbytes <= body.meta(entry.first).nbytes


def _chosen(
    body: Body,
    outputs: Sequence[int],
    gradients: Sequence[int],
    tangents: Sequence[int | None],
    partition_fn: PartitionFn,
) -> set[int]:
    """The values that the forward graph of ``partition_fn`` returns in addition to the results."""
    module, values, examples = _graph(body, outputs, gradients, tangents)
    forward, _ = partition_fn(module, examples, num_fwd_outputs=len(outputs))
    (returned,) = next(n for n in forward.graph.nodes if n.op == "output").args
    chosen: set[int] = set()
    for node in returned[len(outputs) :]:
        vid = values.get(node.name) if isinstance(node, Node) else None
        if vid is None:
            raise ValueError(MSG_UNKNOWN.format(name=getattr(node, "name", node)))
        chosen.add(vid)
    return chosen


def _graph(
    body: Body, outputs: Sequence[int], gradients: Sequence[int], tangents: Sequence[int | None]
) -> tuple[GraphModule, dict[str, int], tuple[list[object], list[object]]]:
    """The two passes as an FX graph for functorch's partitioners, and the value numbers by names of nodes."""
    graph = Graph()
    nodes: dict[int, Node] = {}
    examples: dict[str, list[object]] = {"primals": [], "tangents": []}
    inputs = [entry.first for entry in inputs_of(body.entries)]
    with FakeTensorMode():
        for vid in sorted(inputs, key=lambda v: v in tangents):  # partitioners go by these names
            kind = "tangents" if vid in tangents else "primals"
            node = graph.placeholder(f"{kind}_{len(examples[kind]) + 1}")
            node.meta["val"] = _fake(body.meta(vid))
            examples[kind].append(node.meta["val"])
            nodes[vid] = node
        for operation in operations_of(body.entries):
            _add(graph, nodes, operation)
    graph.output(tuple(nodes[v] for v in (*outputs, *gradients)))
    names = {node.name: vid for vid, node in nodes.items()}
    module = GraphModule(torch.nn.Module(), graph)
    return module, names, (examples["primals"], examples["tangents"])


def _fake(meta: TensorMeta) -> torch.Tensor:
    return torch.empty(meta.shape, dtype=meta.dtype)


def _add(graph: Graph, nodes: dict[int, Node], entry: Operation) -> None:
    """Add a node for an operation, and a node for each of its results if there are several."""

    def shown(a: object) -> object:
        if isinstance(a, Ref):
            return nodes[a.vid]
        if isinstance(a, Lift):
            return 1.0 if isinstance(a.example, TensorMeta) else a.example
        return [shown(item) for item in a] if isinstance(a, (list, tuple)) else a

    plan = entry.plan
    # partitioners never recompute operators that write; what was recorded is pure in any case
    target = (pure_form(plan.overload) or plan.overload) if plan.written else plan.overload
    named = {name: shown(a) for name, a in entry.kwargs.items() if name != SEED}
    node = graph.call_function(target, tuple(map(shown, entry.args)), named)
    if len(entry.metas) == 1:
        node.meta["val"] = None if entry.metas[0] is None else _fake(entry.metas[0])
        nodes[entry.first] = node
        return
    node.meta["val"] = tuple(None if m is None else _fake(m) for m in entry.metas)
    for i, value in enumerate(node.meta["val"]):
        if value is not None:
            item = nodes[entry.first + i] = graph.call_function(operator.getitem, (node, i))
            item.meta["val"] = value
