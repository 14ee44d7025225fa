"""Recorded steps, to be read: their operations, operands, shapes, and what is wanted of them."""

from __future__ import annotations

from xla_core.execution.pending_graph import excerpt, graph_of, is_pending
from xla_core.execution.run_step import wanted
from xla_core.lowering.replay import needed_entries
from xla_core.lowering.step_products import products
from xla_core.operators.tensor_meta import TensorMeta, tensor_meta
from xla_core.recording.entry import Entry, Input, Operation, inputs_of, operations_of
from xla_core.recording.step_key import Lift, Ref
from xla_core.recording.trace import Trace

__all__ = [
    "Entry",
    "Input",
    "Lift",
    "Operation",
    "Ref",
    "TensorMeta",
    "Trace",
    "excerpt",
    "graph_of",
    "inputs_of",
    "is_pending",
    "needed_entries",
    "operations_of",
    "products",
    "tensor_meta",
    "wanted",
]
