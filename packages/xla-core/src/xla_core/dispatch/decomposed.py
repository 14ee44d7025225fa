"""Operators that PyTorch's decompositions define by operators which have rules.

They are recorded as one entry; the decomposition is traced once per operand shapes, and
followed when the step is lowered.
"""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload

from xla_core.dispatch.cpu_fallback import fallback_handler
from xla_core.dispatch.functional import find_trace, wrap_results
from xla_core.dispatch.meta_inference import OperatorPlan
from xla_core.operators.decompositions import DecomposedRule
from xla_core.operators.schema import Signature
from xla_core.recording.xla_tensor import Handler


def decomposed_handler(overload: OpOverload, facts: Signature) -> Handler:
    """A handler that records ``overload``, or falls back where its decomposition needs the CPU."""
    rule = DecomposedRule(overload)
    plan = OperatorPlan(overload, rule)
    on_cpu = fallback_handler(overload, facts)

    def decomposed(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        trace = find_trace(args, kwargs)
        with trace.lock:
            if rule.lowerable(args, kwargs or {}):
                return wrap_results(trace, trace.record(plan, args, kwargs), facts.returns)
        return on_cpu(args, kwargs)

    return decomposed
