"""Cuts an FX graph where an operator runs on the CPU, or a value is read: what lies between is compiled.

The parts keep the graph's order, so what writes to an argument stays between what reads it before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import fx
from torch.fx.passes.split_module import split_module
from torch.utils import _pytree as pytree

from xla_core.contract.foreign_values import AnyFunction
from xla_core.operators.error_messages import ValueNeededError
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import XLATensor
from xla_core.torch_bridge.operands import Operand

MSG_UNREADABLE: Final = "a graph that is recorded once cannot depend on a value"

_CALLS: Final = ("call_function", "call_method", "call_module")

Compile = Callable[[fx.GraphModule], AnyFunction]


class HostNodes(fx.Interpreter):
    """Runs a graph once and finds the nodes that read a value, or take or make one on the host.

    ``found`` has their names.
    """

    def __init__(self, model: fx.GraphModule, trace: Trace) -> None:
        super().__init__(model)
        self._trace = trace
        self.found: set[str] = set()

    def run_node(self, n: fx.Node) -> Operand:
        """The node's result; one that needs a value gets it, and is noted."""
        if n.op not in _CALLS:
            return super().run_node(n)
        self._trace.refuse_reads(MSG_UNREADABLE)
        try:
            result = super().run_node(n)
        except ValueNeededError as error:
            if error.reason is not MSG_UNREADABLE:  # another one's refusal, inside the node
                raise
        else:
            if _on_host([result, *map(self.env.get, n.all_input_nodes)]):
                self.found.add(n.name)
            return result
        finally:
            self._trace.refuse_reads(None)
        self.found.add(n.name)
        return super().run_node(n)


def _on_host(values: Operand) -> bool:
    """Whether a tensor among ``values`` is elsewhere than on an ``xla`` device."""
    return any(
        isinstance(value, torch.Tensor) and not isinstance(value, XLATensor)
        for value in pytree.tree_leaves(values)
    )


class _Part(torch.nn.Module):
    """A part of a graph as one program."""

    def __init__(self, run: Callable[..., object]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *args: Operand) -> Operand:
        """The part's results."""
        return self._run(*args)


def partition(
    model: fx.GraphModule, args: Sequence[Operand], trace: Trace, compile: Compile
) -> fx.GraphModule | None:
    """``model`` with the parts between its host nodes replaced by ``compile(part)``; None if it has none.

    The graph is run once on copies of ``args`` to find out; what it writes to its own buffers is undone.
    """
    on_host = _host_nodes(model, args, trace)
    if not on_host:
        return None
    numbers = _numbered(model, on_host)
    parts = split_module(model, model, lambda n: numbers[n.name], keep_original_order=True)
    host = {numbers[name] for name in on_host}
    for number in set(numbers.values()) - host:
        name = f"submod_{number}"
        part = getattr(parts, name, None)  # the part with nothing but the output is not made
        if part is not None and any(n.op in _CALLS for n in part.graph.nodes):
            setattr(parts, name, _Part(compile(part)))
    return parts


def one_part(model: fx.GraphModule, compile: Compile) -> fx.GraphModule:
    """A graph that calls ``compile(model)``."""
    whole = split_module(model, model, lambda _node: 0)
    whole.submod_0 = _Part(compile(whole.submod_0))
    return whole


def _host_nodes(model: fx.GraphModule, args: Sequence[Operand], trace: Trace) -> set[str]:
    held = [t for t in (*model.parameters(), *model.buffers()) if isinstance(t, XLATensor)]
    former = [(t, t._version, t.detach().clone()) for t in held]
    copies = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
    finder = HostNodes(model, trace)
    finder.run(*copies)
    for tensor, version, value in former:
        if tensor._version != version:
            tensor.detach().copy_(value)
    return finder.found


def _numbered(model: fx.GraphModule, host: set[str]) -> dict[str, int]:
    """A part's number for each node: a host node is alone, what lies between two is one part."""
    numbers: dict[str, int] = {}
    number, former = 0, False
    for node in model.graph.nodes:
        alone = node.name in host
        if alone or former:
            number += 1
        numbers[node.name] = number
        former = alone
    return numbers
