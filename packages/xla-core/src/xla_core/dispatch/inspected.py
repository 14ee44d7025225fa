"""Handlers of operators whose result's shape depends on values: computed on the device and cut there.

The step runs up to the operator, which gives results as large as they can be and a number that
says how large they are. Only that number is fetched. It also tells of mistakes that only the values
show: the CPU is then asked for its error, which is raised at the user's line.
"""

from __future__ import annotations

import functools
from typing import Final

import torch
from torch._ops import OpOverload

from xla_core.dispatch.cpu_fallback import fallback_handler, refuse
from xla_core.dispatch.functional import find_trace, wrap_results
from xla_core.dispatch.meta_inference import OperatorPlan
from xla_core.dispatch.transfers import HOST_VIEW_BYTES, read
from xla_core.operators.lowering_registry import ALL_OR_NOTHING, InspectedRule, find_view
from xla_core.operators.plan import Plan
from xla_core.operators.schema import Signature
from xla_core.operators.tensor_meta import tensor_meta
from xla_core.recording.storage import View
from xla_core.recording.xla_tensor import Handler, XLATensor, handler_of, tensor_on
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands

aten = torch.ops.aten


def inspected_handler(overload: OpOverload, inspected: InspectedRule, facts: Signature) -> Handler:
    """A handler that records ``overload``, looks at what the result depends on, and cuts it."""
    plan = OperatorPlan(overload, inspected.rule, name=f"{overload} inspected")
    then = None
    if inspected.then is not None:
        then = OperatorPlan(overload, inspected.then, name=f"{overload} of a size")
    on_cpu = fallback_handler(overload, facts)

    def inspect(args: Operands, kwargs: NamedOperands | None) -> Operand:
        trace = find_trace(args, kwargs)
        if inspected.platforms is not None and trace.backend.platform not in inspected.platforms:
            return on_cpu(args, kwargs)
        named = kwargs or {}
        with trace.lock:
            *results, number = wrap_results(trace, trace.record(plan, args, kwargs), "tuple")
        if inspected.looks is not None and not inspected.looks(*args, **named):
            return results[0] if facts.returns == "tensor" else tuple(results)
        size = int(read(number))
        if size < 0:
            refuse(overload, args, named)
            return on_cpu(args, kwargs)  # it does not refuse
        if then is not None:
            with trace.lock:
                entry = trace.record(then, args, {**named, "size": size})
                return wrap_results(trace, entry, facts.returns)
        for place, dim in enumerate(inspected.dims(*args, **named)):
            if dim == ALL_OR_NOTHING:
                results[place] = results[place] if size else results[place].new_empty(0)
            elif dim is not None:
                results[place] = cut(results[place], dim, size)
        return results[0] if facts.returns == "tensor" else tuple(results)

    return inspect


def cut(whole: XLATensor, dim: int, size: int) -> XLATensor:
    """The first ``size`` entries of ``whole``, which nothing else refers to, along ``dim``.

    A small tensor stays as it is and is looked at in part, so that reading it needs no program; of a
    large one the rest is given up.
    """
    s = whole._s
    if s.meta.shape[dim] <= size:
        return whole
    dim %= len(s.meta.shape)
    if s.meta.nbytes > HOST_VIEW_BYTES:
        return handler_of(aten.slice_copy.Tensor)((whole, dim, 0, size), None)
    shape = (*s.meta.shape[:dim], size, *s.meta.shape[dim + 1 :])
    meta = tensor_meta(shape, s.meta.dtype)
    # Recorded when a step reads it, not before: the next step must not depend on a size that only the
    # host looks at.
    tail = (int, dim, int, 0, int, size)
    view = View(None, _slices(), tail, (dim, 0, size), meta, -1, _NEVER_READ, s.version)
    return tensor_on(s, view)


# The epoch of a view whose value no trace has.
_NEVER_READ: Final = -1


@functools.cache
def _slices() -> Plan:
    return OperatorPlan(aten.slice.Tensor, find_view(aten.slice.Tensor))
