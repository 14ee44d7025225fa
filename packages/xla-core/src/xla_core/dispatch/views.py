"""Handlers of view operators, whose results share the storage and store the view operation."""

from __future__ import annotations

from threading import get_ident

import torch
from torch._ops import OpOverload

from xla_core.operators.lowering_registry import MultiViewRule
from xla_core.operators.plan import Plan
from xla_core.operators.schema import Signature
from xla_core.operators.tensor_meta import tensor_meta
from xla_core.recording import xla_tensor as tensor_module
from xla_core.recording.storage import View
from xla_core.recording.xla_tensor import Handler, XLATensor, handler_of, tensor_on
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands
from xla_core.torch_bridge.torch_private import asked_by_autograd, current_backward, make_wrapper

is_inference_mode = torch.is_inference_mode_enabled


def as_the_other_kind(*args: Operand) -> Operand:
    """``make_wrapper`` for a normal tensor inside ``torch.inference_mode()``, or for an inference tensor outside.

    A view has the kind of its base, wherever it is made, because both share the version counter or have none.
    """
    with torch.inference_mode(not is_inference_mode()):
        return make_wrapper(*args)


def become(target: XLATensor, source: XLATensor) -> XLATensor:
    """Make ``target`` share the storage, view and shape of ``source`` from now on; the Python object remains."""
    shown = source
    if target.is_inference() is not source.is_inference():
        make = make_wrapper if is_inference_mode() is target.is_inference() else as_the_other_kind
        what = (None, None, None, source.dtype, torch.strided, source.device)
        shown = make(XLATensor, source.shape, *what)
    tensor_module.become(target, source, shown)
    return target


def showing(
    tensor: XLATensor,
    view: View | None,
    strides: tuple[int, ...] | None = None,
    offset: int | None = None,
) -> XLATensor:
    """A tensor of the same kind that shows another part of ``tensor``'s storage, or all of it (None).

    ``strides`` and ``offset`` are those that its C++ part reports (default: contiguous).
    """
    make = make_wrapper if is_inference_mode() is tensor.is_inference() else as_the_other_kind
    return tensor_on(tensor._s, view, make, strides=strides, offset=offset)


def with_strides(tensor: XLATensor, stride: tuple[int, ...], offset: int) -> XLATensor:
    """A tensor that shows the same as ``tensor``, whose C++ part reports these strides and this offset."""
    return showing(tensor, tensor._v, stride, offset)


def view_handler(plan: Plan, signature: Signature) -> Handler:
    """A handler for an operator that returns one view of its first argument."""
    names = signature.names

    def view(args: Operands, kwargs: NamedOperands | None) -> Operand:
        if kwargs:
            args = positional(args, kwargs, names, plan)
        base = args[0]
        s = base._s
        trace = s.trace
        with trace.bare:
            entry = trace.record(plan, args, None)
            meta = entry.single
            make = make_wrapper if is_inference_mode() is base.is_inference() else as_the_other_kind
            tail = entry.key[2:]
            v = View(base._v, plan, tail, args[1:], meta, entry.first, trace.epoch, s.version)
            return tensor_on(s, v, make)

    return view


def positional(
    args: Operands, kwargs: NamedOperands, names: tuple[str, ...], plan: Plan
) -> tuple[object, ...]:
    """All arguments in the schema's order, so that a view always has the same key."""
    full = list(args)
    defaults = plan.overload._schema.arguments
    for position in range(len(args), len(names)):
        name = names[position]
        full.append(kwargs[name] if name in kwargs else defaults[position].default_value)
    return tuple(full)


def alias(args: Operands, _kwargs: NamedOperands | None) -> Operand:
    """``detach``, ``alias``: another tensor object with the same storage and view."""
    base = args[0]
    make = make_wrapper if is_inference_mode() is base.is_inference() else as_the_other_kind
    return tensor_on(base._s, base._v, make)


def detach(args: Operands, kwargs: NamedOperands | None) -> Operand:
    """``detach``: an alias, except for a gradient that becomes a leaf's ``.grad``.

    If the strides of a gradient are not those of the leaf, autograd copies it (``AccumulateGrad``). Here all
    strides look the same, and ``.grad`` would remain a transpose or expansion of another
    tensor, which a write to ``.grad`` must not change. So a view gets its own storage. ``.data`` and
    ``detach()`` in a backward function of a user's are aliases, to which it may write.
    """
    base = args[0]
    if (
        base._v is None
        or current_backward() == -1
        or torch.is_grad_enabled()
        or not asked_by_autograd()
    ):
        # the same as ``alias``, without a call: each result that autograd saves is detached
        make = make_wrapper if is_inference_mode() is base.is_inference() else as_the_other_kind
        return tensor_on(base._s, base._v, make)
    trace = base._s.trace
    with trace.bare:
        if trace.thread != get_ident():
            trace.turns.take()
        return trace.new_tensor(base._v.meta, trace.read_view(base._v, base._s))


def multi_view_handler(rule: MultiViewRule, signature: Signature, plan: Plan) -> Handler:
    """A handler for ``split`` and similar operators, which return a list of single views."""

    known: dict[object, list[tuple[Handler, tuple[object, ...]]]] = {}

    def views(args: Operands, kwargs: NamedOperands | None) -> Operand:
        if kwargs:
            args = positional(args, kwargs, signature.names, plan)
        base = args[0]
        meta = base._v.meta if base._v is not None else base._s.meta
        key = (meta, *[tuple(a) if type(a) is list else a for a in args[1:]])
        parts = known.get(key)
        if parts is None:
            plan.infer(args, {})  # raises what PyTorch raises for these sizes
            parts = [
                (handler_of(overload), rest) for overload, rest in rule.expand(meta, *args[1:])
            ]
            known[key] = parts
        return [handler((base, *rest), None) for handler, rest in parts]

    return views


def inplace_view_handler(pure: OpOverload) -> Handler:
    """A handler for ``transpose_`` and similar operators, which change the view of the tensor itself."""

    def reshape_self(args: Operands, kwargs: NamedOperands | None) -> Operand:
        return become(args[0], handler_of(pure)(args, kwargs))

    return reshape_self


def set_source(args: Operands, _kwargs: NamedOperands | None) -> Operand:
    """``set_(tensor)``: share the other tensor's storage from now on."""
    target, source = args
    if not isinstance(source, XLATensor):
        raise RuntimeError(
            f"set_ of a tensor on {target.device} needs a tensor there, got one on {source.device}"
        )
    return become(target, source)


def set_nothing(args: Operands, _kwargs: NamedOperands | None) -> Operand:
    """``set_()``: give the tensor a new storage without elements."""
    target = args[0]
    return become(target, target._s.trace.from_buffer(None, tensor_meta((0,), target.dtype)))
