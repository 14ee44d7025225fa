"""Handlers of operators that return new tensors, by a rule or by PyTorch's definition through other operators."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from xla_core.dispatch import layouts, random_numbers
from xla_core.dispatch.meta_inference import OperatorPlan
from xla_core.execution import generator
from xla_core.execution.runtime import trace_of
from xla_core.operators.decompositions import DecomposedRule
from xla_core.operators.plan import SEED, Plan
from xla_core.recording import random_state
from xla_core.recording.trace import Entry, Trace
from xla_core.recording.xla_tensor import Handler, XLATensor
from xla_core.torch_bridge import reference_kernels
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands


def find_trace(args: Operand, kwargs: Operand = None) -> Trace:
    """The trace of the first ``xla`` tensor among the arguments, else that of the argument ``device``."""
    trace = _search(args) or (_search(kwargs.values()) if kwargs else None)
    if trace is None:
        device = kwargs.get("device") if kwargs else None
        trace = trace_of(device if device is not None else torch.device("xla"))
    return trace


def _search(items: Operand) -> Trace | None:
    for a in items:
        if isinstance(a, XLATensor):
            return a._s.trace
        if isinstance(a, layouts.SparseXLATensor):
            return layouts.parts(a)[1]._s.trace
        if isinstance(a, (list, tuple)):
            trace = _search(a)
            if trace is not None:
                return trace
    return None


def functional_handler(plan: Plan, returns: str) -> Handler:
    """A handler that records the operator, and wraps its results as its schema declares."""

    def functional(args: Operands, kwargs: NamedOperands | None) -> Operand:
        first = args[0] if args else None
        trace = first._s.trace if type(first) is XLATensor else find_trace(args, kwargs)
        with trace.bare:
            entry = trace.record(plan, args, kwargs)
            meta = entry.single
            if meta is None or returns != "tensor":
                return wrap_results(trace, entry, returns)
            return trace.new_tensor(meta, entry.first)

    if plan.random:
        return seeded(functional, plan)
    return functional


def seeded(handler: Handler, plan: Plan) -> Handler:
    """``handler`` with a new seed as an extra argument, from ``generator=`` or from the device.

    Raises RuntimeError for a generator of another device, and the CPU's error for a distribution
    that cannot be drawn from; then no seed is drawn.
    """

    check = random_numbers.check_of(plan.overload)
    names = [argument.name for argument in plan.overload._schema.arguments]
    place = names.index("generator") if "generator" in names else len(names)

    def random(args: Operands, kwargs: NamedOperands | None) -> Operand:
        trace = find_trace(args, kwargs)
        named = dict(kwargs) if kwargs else {}
        given = named.get("generator")
        if given is not None:
            named["generator"] = None
        elif place < len(args):
            given = args[place]  # a positional generator is the last argument, and may be left out
            args = args[:place]
        if check is not None:
            check(args, named)
        if given is None:
            named[SEED] = random_state.next_seed(trace.device.index)
        else:
            named[SEED] = generator.seed_from(given)
        return handler(args, named)

    return random


def wrap_results(trace: Trace, entry: Entry, returns: str) -> Operand:
    """New tensors for the entry's values; None in place of a result that does not exist."""
    tensors = [
        None if meta is None else trace.new_tensor(meta, entry.first + i)
        for i, meta in enumerate(entry.metas)
    ]
    if returns == "tensor":
        return tensors[0]
    return tensors if returns == "list" else tuple(tensors)


def factory_handler(plan: Plan) -> Handler:
    """A handler for operators whose device is an argument (``zeros``, ``new_full``, ``full_like``)."""

    def factory(args: Operands, kwargs: NamedOperands | None) -> Operand:
        device = kwargs.get("device") if kwargs else None
        if device is not None and device.type != "xla":
            return plan.overload(*_on_host(plan, args), **(kwargs or {}))
        own = _search(args)
        trace = trace_of(device) if device is not None else own or find_trace(args, kwargs)
        if own is not None and own is not trace:
            args = tuple(_on_device(plan, i, a, trace) for i, a in enumerate(args))
        with trace.bare:
            entry = trace.record(plan, args, kwargs)
            return wrap_results(trace, entry, "tensor")

    if plan.random:
        return seeded(factory, plan)
    return factory


def _is_pattern(plan: Plan, position: int) -> bool:
    """Whether a factory uses only an argument's shape and dtype (``full_like(x, ...)``)."""
    return bool(plan.overload._schema.arguments[position].name == "self")


def _on_host(plan: Plan, args: Operands) -> list[Operand]:
    """The arguments for the CPU; a pattern is passed without its values."""
    return [
        (torch.empty(a.shape, dtype=a.dtype) if _is_pattern(plan, i) else a.cpu())
        if isinstance(a, XLATensor)
        else a
        for i, a in enumerate(args)
    ]


def _on_device(plan: Plan, position: int, a: Operand, trace: Trace) -> Operand:
    """An argument for another ``xla`` device; a pattern becomes a tensor without a value."""
    if not isinstance(a, XLATensor):
        return a
    if not _is_pattern(plan, position):
        return a.to(trace.device)
    return trace.from_buffer(None, a._v.meta if a._v is not None else a._s.meta)


def composite_handler(overload: OpOverload) -> Handler:
    """A handler for an operator that PyTorch defines by others, which reaches the device in inference mode."""

    def composite(args: Operands, kwargs: NamedOperands | None) -> Operand:
        return overload.decompose(*args, **(kwargs or {}))

    return composite


def one_hot(args: Operands, kwargs: NamedOperands | None) -> Operand:
    """``one_hot`` by its C++ definition; PyTorch's Python definition also asserts what the CPU would check."""
    return reference_kernels.in_cpp(torch.ops.aten.one_hot.default)(*args, **(kwargs or {}))


def decomposed_handler(overload: OpOverload, returns: str, on_cpu: Handler) -> Handler:
    """A handler for an operator that PyTorch decomposes into operators with rules.

    It is recorded as one entry. The decomposition is traced once per operand shapes, and evaluated when the
    step is lowered. If it needs the CPU, ``on_cpu`` handles the call.
    """
    rule = DecomposedRule(overload)
    plan = OperatorPlan(overload, rule)

    def decomposed(args: Operands, kwargs: NamedOperands | None) -> Operand:
        trace = find_trace(args, kwargs)
        with trace.lock:
            if rule.lowerable(args, kwargs or {}):
                return wrap_results(trace, trace.record(plan, args, kwargs), returns)
        return on_cpu(args, kwargs)

    return decomposed
