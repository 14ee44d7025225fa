"""The pending graph as StableHLO text or bytecode."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xla_core.contract.device_protocol import Program
from xla_core.execution import run_step, runtime
from xla_core.jax_bridge import jax_private
from xla_core.lowering import step_program
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import XLATensor

MSG_NO_GRAPH = "there is no graph to show: no tensor was given, and nothing is pending on {device}"
MSG_NOT_XLA = "get_stablehlo shows the graph of xla tensors, got one on {device}"


def stablehlo_text(tensors: Sequence[torch.Tensor] | None = None) -> str:
    """The graph that computes ``tensors`` (default: all pending values of the current device), as MLIR text.

    Nothing runs. Raises RuntimeError if no tensor is given and nothing is pending, TypeError for a tensor that is
    not on an ``xla`` device.
    """
    return jax_private.module_text(_program(tensors).stablehlo)


def stablehlo_bytecode(tensors: Sequence[torch.Tensor] | None = None) -> bytes:
    """``stablehlo_text`` as MLIR bytecode."""
    return _program(tensors).stablehlo


def _program(tensors: Sequence[torch.Tensor] | None) -> Program:
    for tensor in tensors or ():
        if not isinstance(tensor, XLATensor):
            raise TypeError(MSG_NOT_XLA.format(device=tensor.device))
    trace = tensors[0]._s.trace if tensors else runtime.trace_of(None)  # type: ignore[attr-defined]
    pending = tensors[0]._s if tensors else None  # type: ignore[attr-defined]
    with trace.lock, trace.turns.showing(pending):
        outputs = _outputs(trace, tensors)
        if not outputs:
            raise RuntimeError(MSG_NO_GRAPH.format(device=trace.device))
        name = trace.graph_name or "graph"
        entries = trace.cur.path()
        layout = trace.backend.layout(trace, entries, outputs, ())
        return step_program.lower(trace, entries, outputs, layout, name)


def _outputs(trace: Trace, tensors: Sequence[torch.Tensor] | None) -> tuple[int, ...]:
    if tensors:
        # the same value twice is one output
        return tuple(dict.fromkeys(trace.value_of(t) for t in tensors))  # type: ignore[arg-type]
    return tuple(run_step.wanted(trace)[2])
