"""Batch normalisation, whose schema hides that it writes to the running statistics."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from xla_core.dispatch.functional import functional_handler, wrap_results
from xla_core.dispatch.meta_inference import OperatorPlan
from xla_core.operators.lowering_registry import find_rule
from xla_core.operators.tensor_meta import tensor_meta
from xla_core.recording.xla_tensor import Handler
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands

aten = torch.ops.aten
_PURE = aten._native_batch_norm_legit_functional.default
_NO_STATS = aten._native_batch_norm_legit.no_stats


def handler(overload: OpOverload) -> Handler | None:
    """The handler of a batch norm overload, or None for any other operator."""
    if overload not in (aten.native_batch_norm.default, aten._native_batch_norm_legit.default):
        return None
    pure = OperatorPlan(_PURE, find_rule(_PURE))
    without = functional_handler(OperatorPlan(_NO_STATS, find_rule(_NO_STATS)), "tuple")

    def batch_norm(args: Operands, kwargs: NamedOperands | None) -> Operand:
        given = [*args, *(kwargs or {}).values()]
        source, _weight, _bias, mean, variance, training = given[:6]
        if mean is None or variance is None:
            return without((*given[:3], True, *given[6:8]), None)
        trace = source._s.trace
        with trace.lock:
            entry = trace.record(pure, given, None)
            if not training:
                # As on the CPU: nothing was computed from the batch, so nothing is saved.
                saved = trace.from_buffer(None, tensor_meta((0,), mean.dtype))
                return trace.new_tensor(entry.metas[0], entry.first), saved, saved.detach()
            trace.write(mean, entry.first + 3)
            trace.write(variance, entry.first + 4)
            return wrap_results(trace, entry, "tuple")[:3]

    return batch_norm
