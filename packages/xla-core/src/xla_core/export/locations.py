"""Writes the metadata of FX nodes, as JSON, into the MLIR locations of a program's operations."""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch.fx import Node

from xla_core.jax_bridge.jax_private import Relocation

_DELIMITER = ";"


def node_metadata(node: Node) -> dict[str, str]:
    """The metadata of an FX node about its origin, by the names that torch.export uses.

    ``nn_module_stack`` lists ``key,path,type`` of the modules around the node, outermost first.
    """
    metadata: dict[str, str | None] = {
        "node": node.name,
        "stack_trace": node.meta.get("stack_trace"),
    }
    modules = node.meta.get("nn_module_stack") or {}
    metadata["nn_module_stack"] = _DELIMITER.join(
        f"{key},{path},{kind if isinstance(kind, str) else kind.__qualname__}"
        for key, (path, kind) in modules.items()
    )
    metadata["torch_fn"] = _DELIMITER.join(map(str, node.meta.get("torch_fn") or ()))
    return {name: value for name, value in metadata.items() if value}


def relocation(nodes: Mapping[str, Node]) -> Relocation:
    """A function from an operation's name, which contains a scope in ``nodes``, to its node's metadata."""

    def place(name: str) -> tuple[str, str, int] | None:
        for part in reversed(name.split("/")):
            if part in nodes:
                return json.dumps(node_metadata(nodes[part])), "", 0
        return None

    return place
