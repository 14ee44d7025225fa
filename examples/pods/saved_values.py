"""Which values a layer in a loop saves for its backward pass: policies between all and none.

``scan`` takes a partition function, which gets both passes of a layer as one graph of PyTorch's operators and
returns the two of them. What its forward pass returns in addition to the results is saved; the rest is computed
again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Final

import torch
from torch.fx import GraphModule, Node

aten: Final = torch.ops.aten
PRODUCTS: Final = {
    aten.linear.default, aten.einsum.default, aten.matmul.default, aten.mm.default, aten.bmm.default
}  # fmt: skip
PartitionFunction = Callable[..., tuple[GraphModule, GraphModule]]


def saving_products(widest: int | None = None) -> PartitionFunction:
    """Save what attention and products give, but not products with more than ``widest`` features.

    Without the widest, those of an MLP, it saves a fraction of the memory (MaxText's ``save_dot_except_mlp``).
    """

    def is_saved(node: Node) -> bool:
        if node.target in PRODUCTS:
            return widest is None or node.meta["val"].shape[-1] <= widest
        # what the kernel gives: the parts on the mesh, put together
        return "to_whole" in str(node.target)

    def partition(
        joint: GraphModule, _inputs: object, *, num_fwd_outputs: int
    ) -> tuple[GraphModule, GraphModule]:
        forward = copy.deepcopy(joint)
        (output,) = forward.graph.find_nodes(op="output")
        after = _backward(forward)
        saved = [node for node in forward.graph.nodes if node not in after and is_saved(node)]
        output.args = ((*output.args[0][:num_fwd_outputs], *saved),)
        forward.graph.eliminate_dead_code()
        forward.recompile()
        return forward, joint

    return partition


def _backward(joint: GraphModule) -> set[Node]:
    """What depends on the gradients of the results."""
    nodes: set[Node] = set()
    for node in joint.graph.nodes:
        if "tangents" in node.name or not nodes.isdisjoint(node.all_input_nodes):
            nodes.add(node)
    return nodes
