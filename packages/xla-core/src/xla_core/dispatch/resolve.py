"""Chooses the handler of an operator overload, at its first call.

In this order: a handler of its own; a kernel that was registered with PyTorch; a rule that reads
values first; a view rule; the pure form of an in-place or ``out=`` operator; a lowering rule; PyTorch's own
definition by other operators; PyTorch's decomposition; the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch._ops import OpOverload

from xla_core.dispatch import (
    cpu_error_parity,
    functional,
    host_length_operands,
    index_ranges,
    indexing,
    layouts,
    mutation,
    sparse_operators,
    transfers,
    views,
    windows,
)
from xla_core.dispatch.cpu_fallback import fallback_handler, outside_handler
from xla_core.dispatch.functional import (
    composite_handler,
    decomposed_handler,
    factory_handler,
    functional_handler,
)
from xla_core.dispatch.inspected import inspected_handler
from xla_core.dispatch.meta_inference import OperatorPlan
from xla_core.lowering import load_rules
from xla_core.operators.decompositions import has_decomposition, lowerable
from xla_core.operators.lowering_registry import (
    Rule,
    find_inspected,
    find_multi_view,
    find_rule,
    find_view,
)
from xla_core.operators.schema import Signature, pure_form, signature
from xla_core.recording import step_values
from xla_core.recording import xla_tensor as tensor_module
from xla_core.recording.xla_tensor import Handler, XLATensor, forget_handler, handler_of
from xla_core.support import flags
from xla_core.support.once import Once
from xla_core.torch_bridge.aot_graphs import untraced
from xla_core.torch_bridge.op_library import (
    is_for_every_device,
    is_from_outside,
    kernel_from_outside,
)
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands
from xla_core.torch_bridge.torch_private import allow_list_kernels, let_make_fx_take
from xla_core.torch_bridge.whole_operators import leave_whole, whole_kernel

aten = torch.ops.aten

_OWN: dict[OpOverload, Handler] = {
    aten.detach.default: views.detach,
    aten.alias.default: views.alias,
    aten.lift_fresh.default: views.alias,
    aten.copy_.default: transfers.copy_,
    aten._copy_from.default: transfers.copy_from,
    aten._local_scalar_dense.default: transfers.local_scalar,
    aten.equal.default: transfers.equal,
    aten._sparse_addmm.default: sparse_operators.sparse_addmm,
    aten.one_hot.default: functional.one_hot,
    aten.normal.Tensor_float_out: mutation.normal_into,
    aten.sspaddmm.default: sparse_operators.refusing_handler(aten.sspaddmm.default),
    aten.sparse_mask.default: sparse_operators.sparse_mask,
    aten._to_sparse.default: sparse_operators.to_sparse,
    aten._to_sparse.sparse_dim: sparse_operators.to_sparse,
    aten._sparse_coo_tensor_with_dims_and_tensors.default: sparse_operators.with_parts,
    aten._ctc_loss.default: host_length_operands.ctc_loss,
    aten._ctc_loss_backward.default: host_length_operands.ctc_loss_backward,
    aten._pack_padded_sequence.default: host_length_operands.pack_padded_sequence,
    aten.allclose.default: transfers.allclose,
    aten._nested_tensor_from_mask_left_aligned.default: transfers.is_left_aligned,
    aten.is_pinned.default: transfers.is_pinned,
    aten._pin_memory.default: transfers.pin_memory,
    aten.is_same_size.default: transfers.is_same_size,
    aten._has_same_storage_numel.default: transfers.has_same_storage_numel,
    aten._new_zeros_with_same_feature_meta.default: transfers.new_zeros_for_tangent,
    aten._linalg_check_errors.default: transfers.check_linalg,
    aten.empty.memory_format: transfers.empty,
    aten.empty_strided.default: transfers.empty,
    aten.empty_permuted.default: transfers.empty_permuted,
    aten.new_empty.default: transfers.new_empty,
    aten.new_empty_strided.default: transfers.new_empty,
    aten.empty_like.default: transfers.empty_like,
    aten.zero_.default: mutation.zero_,
    aten.fill_.Scalar: mutation.fill_,
    aten.set_.source_Tensor: views.set_source,
    aten.set_.default: views.set_nothing,
    torch.ops.xla.dynamo_set_buffer_donor_.default: transfers.set_buffer_donor,
}

_WINDOWS: dict[OpOverload, Callable[[], Handler]] = {
    aten.as_strided.default: windows.as_strided_handler,
    aten.as_strided_copy.default: windows.as_strided_copy_handler,
    aten.as_strided_scatter.default: windows.as_strided_scatter_handler,
}


def _resize(args: Operands, _kwargs: NamedOperands | None) -> Operand:
    mutation.resize(args[0], tuple(args[1]))
    return args[0]


def _resize_as(args: Operands, _kwargs: NamedOperands | None) -> Operand:
    mutation.resize(args[0], tuple(args[1].shape))
    return args[0]


def _recorded(overload: OpOverload, facts: Signature) -> Handler:
    rule = find_rule(overload)
    assert rule is not None
    return functional_handler(OperatorPlan(overload, rule), facts.returns)


def _special(overload: OpOverload, facts: Signature) -> Handler | None:
    if overload in _OWN:
        return _OWN[overload]
    if overload is aten.resize_.default:
        return _resize
    if overload is aten.resize_as_.default:
        return _resize_as
    if overload is aten._to_copy.default:
        return transfers.to_copy_handler(_recorded(overload, facts))
    if overload in _WINDOWS:
        return _WINDOWS[overload]()
    if overload is aten.to.dtype:
        # its rule is for decompositions; here (inside handlers, in inference mode) the tensor
        # itself must be returned if no conversion is needed
        return composite_handler(overload)
    if overload is aten.repeat_interleave.Tensor:
        return host_length_operands.repeat_interleave_handler(_recorded(overload, facts))
    if overload is aten.index.Tensor:
        return indexing.index_handler(_recorded(overload, facts))
    if overload is aten.index_put.default:
        return indexing.index_put_handler(_recorded(overload, facts), in_place=False)
    if overload is aten.index_put_.default:
        handler = _mutating(overload, facts)
        assert handler is not None
        return indexing.index_put_handler(handler, in_place=True)
    return mutation.batch_norm_handler(overload)


def _calling(kernel: Callable[..., object]) -> Handler:
    """A handler that calls a kernel, which records other operators."""
    return lambda args, kwargs: kernel(*args, **(kwargs or {}))


def make_handler(overload: OpOverload) -> Handler:
    """Make the handler of ``overload``, at its first call."""
    handler = _handler_for(overload)
    may_get_kernel = is_from_outside(overload) and is_for_every_device(overload)
    return _until_registered(overload, handler) if may_get_kernel else handler


def _until_registered(overload: OpOverload, handler: Handler) -> Handler:
    """``handler``, until a library registers a kernel for ``xla`` tensors, which it may do after the first call."""

    def call(args: Operands, kwargs: NamedOperands | None) -> Operand:
        if is_for_every_device(overload):
            return handler(args, kwargs)
        forget_handler(overload)
        return handler_of(overload)(args, kwargs)

    return call


def _handler_for(overload: OpOverload) -> Handler:
    facts = signature(overload)
    special = _special(overload, facts)
    if special is not None:
        return special
    kernel = None if lowerable(overload) else kernel_from_outside(overload)
    if kernel is not None:
        if is_for_every_device(overload):
            return outside_handler(overload, kernel, facts)
        return _calling(kernel)
    inspected = find_inspected(overload)
    if inspected is not None:
        return inspected_handler(overload, inspected, facts)
    if find_view(overload) is not None:
        return views.view_handler(OperatorPlan(overload, find_view(overload)), facts)
    multi = find_multi_view(overload)
    if multi is not None:
        return views.multi_view_handler(multi, facts, OperatorPlan(overload, None))
    if facts.written:
        handler = _writing(overload, facts)
        if handler is not None:
            return handler
    else:
        rule = find_rule(overload)
        if rule is not None:
            plan = OperatorPlan(overload, rule)
            return (
                factory_handler(plan)
                if "device" in facts.names
                else functional_handler(plan, facts.returns)
            )
        if overload._can_decompose():
            whole = whole_kernel(overload)
            return composite_handler(overload) if whole is None else _calling(whole)
        if has_decomposition(overload) and facts.returns in ("tensor", "tuple", "list"):
            return decomposed_handler(overload, facts.returns, fallback_handler(overload, facts))
    if layouts.is_about_layouts(overload):
        return sparse_operators.refusing_handler(overload)
    return fallback_handler(overload, facts)


@untraced
def _handler_with_checks(overload: OpOverload) -> Handler:
    """The handler of ``overload``, which also checks values, and indices as ``XLA_CHECK_INDICES`` says."""
    handler = cpu_error_parity.checking_value(overload, make_handler(overload))
    return index_ranges.checking(overload, handler)


def _writing(overload: OpOverload, facts: Signature) -> Handler | None:
    whole = whole_kernel(overload)
    if whole is not None:
        return _calling(whole)
    pure = pure_form(overload)
    if facts.inplace_view and pure is not None:
        return views.inplace_view_handler(pure)
    if facts.out and pure is not None and not isinstance(find_rule(overload), Rule):
        return mutation.out_handler(overload, pure, facts)
    handler = _mutating(overload, facts)
    if handler is None and overload._can_decompose():
        return composite_handler(overload)
    if handler is None and pure is not None and facts.written == (0,) and has_decomposition(pure):
        return _through_pure(pure)
    return handler


def _mutating(overload: OpOverload, facts: Signature) -> Handler | None:
    """An in-place handler that uses the operator's own rule, or that of its pure form."""
    rule = find_rule(overload)
    if rule is None:
        pure = pure_form(overload)
        rule = find_rule(pure) if pure is not None else None
    if rule is None:
        return None
    return mutation.mutating_handler(OperatorPlan(overload, rule, written=facts.written), facts)


def _through_pure(pure: OpOverload) -> Handler:
    """An in-place handler that uses the decomposition of the pure form."""

    def replace(args: Operands, kwargs: NamedOperands | None) -> Operand:
        result = handler_of(pure)(args, kwargs)
        return transfers.copy_((args[0], result), None)

    return replace


_installed: Final = Once()


def _is_on_one_device(tensor: XLATensor) -> bool:
    # over a mesh, the partitioner keeps the heads of attention split only where lowering sees its products
    return tensor._s.trace.backend.virtual_name is None


def install() -> None:
    """Load the lowering rules, and connect the dispatcher to ``XLATensor`` and torch. Works once."""
    if not _installed.begin():
        return
    load_rules()
    sparse_operators.install()
    tensor_module.set_handler_factory(_handler_with_checks, sparse_operators.beside_dense)
    zeros = find_rule(aten.zeros.default)
    assert zeros is not None
    step_values.set_plan(step_values.ZEROS, OperatorPlan(aten.zeros.default, zeros))
    strided = OperatorPlan(aten.as_strided.default, find_view(aten.as_strided.default))
    step_values.set_plan(step_values.AS_STRIDED, strided)
    windows.install()
    if flags.CHECK_INDICES.get():
        index_ranges.install()
    allow_list_kernels(XLATensor)
    let_make_fx_take(XLATensor)
    leave_whole(XLATensor, _is_on_one_device)
