"""Names of torch_xla's C++ module ``_XLAC`` for settings of recording, naming and running steps."""

from __future__ import annotations

from typing import Final

import torch

from xla_core.execution import eager_mode, runtime
from xla_core.execution.device_backend import keep_numbers as _set_xla_enable_device_data_cache
from xla_core.execution.device_backend import keeps_numbers as _get_xla_enable_device_data_cache
from xla_core.launching import buffer_donation
from xla_core.operators import plan
from xla_core.recording import source_location
from xla_core.recording.entry import Entry, Operation
from xla_core.recording.source_location import Detail, SourceLocation
from xla_core.recording.xla_tensor import XLATensor

MSG_SPECIAL: Final = (
    "0 and 1 are always constants of a program here; to make all numbers constants, call "
    "_set_xla_all_numbers_special_scalars(True)"
)
MSG_FORBIDDEN: Final = (
    "Unexpected execution happens inside the compiled function, exiting: _set_allow_execution(False) is in "
    "effect, and nothing may run until _set_allow_execution(True)"
)


# -- numbers ---------------------------------------------------------------------------------------


def _get_xla_all_numbers_special_scalars() -> bool:
    """Whether every number of an operator is a constant of its program, as 0 and 1 always are."""
    return plan.scalars_are_constants()


def _set_xla_all_numbers_special_scalars(on: bool) -> None:
    """Choose whether every number is a constant of programs recorded from now on (at first: False).

    With constants the compiler knows all numbers, and a step with another number needs another program. Seeds of
    random operators remain arguments.
    """
    plan.make_scalars_constants(on)


def _get_xla_handle_special_scalars() -> bool:
    """True: 0 and 1 are constants of programs."""
    return True


def _set_xla_handle_special_scalars(on: bool) -> None:
    """Accepts True; raises NotImplementedError for False: 0 and 1 are always constants of programs."""
    if not on:
        raise NotImplementedError(MSG_SPECIAL)


# -- steps -----------------------------------------------------------------------------------------


def _get_allow_execution() -> bool:
    """Whether programs may run on the current device."""
    return runtime.trace_of(None).forbidden is None


def _set_allow_execution(allow: bool) -> None:
    """With False, running the calling thread's pending operations raises RuntimeError, until it is set to True."""
    for trace in runtime.traces():
        with trace.lock:
            trace.forbid(None if allow else MSG_FORBIDDEN)


def _get_current_graph_name() -> str:
    """The name of the graph that is being recorded, or an empty string."""
    return runtime.trace_of(None).graph_name or ""


def _set_current_graph_name(name: str) -> None:
    """Set the name in debug output of graphs that the calling thread records from now on; empty: no name."""
    for trace in runtime.traces():
        with trace.lock:
            trace.name_graph(name or None)


def _get_use_eager_mode() -> bool:
    """Whether every operator runs at once when it is called."""
    return eager_mode.is_on()


def _set_use_eager_mode(on: bool) -> None:
    """Switch eager mode on or off; pending operations run first."""
    eager_mode.switch(bool(on))


def _xla_get_enable_alias_with_buffer_donor_config(device: str = "") -> bool:
    """Whether marks of ``_set_buffer_donation`` have an effect; one setting for all devices."""
    del device
    return buffer_donation.aliasing()


def _xla_set_enable_alias_with_buffer_donor_config(
    enable_user_config_alias: bool = False, device: str = ""
) -> None:
    """Choose whether marks of ``_set_buffer_donation`` have an effect; one setting for all devices."""
    del device
    buffer_donation.set_aliasing(enable_user_config_alias)


# -- names in programs -----------------------------------------------------------------------------


def _set_xla_custom_op_name_prefix(
    tensor: torch.Tensor, prefix: str, max_call_stack_depth: int = -1
) -> bool:
    """Put ``prefix`` in front of the name of the operation that computes ``tensor``, in programs made from now on.

    ``max_call_stack_depth`` is how many of its Python frames are kept, innermost first: 0 for none, a negative
    number (default: -1) for all. Returns False for a tensor that is not the pending result of an operation.
    """
    if not isinstance(tensor, XLATensor):
        return False
    trace = tensor._s.trace
    with trace.lock, trace.turns.showing(tensor._s):
        if not trace.is_pending(tensor._s):
            return False
        operation = _operation_of(trace.cur, trace.value_of(tensor))
        if operation is None:
            return False
        location = _in_scope(operation.where, prefix.rstrip("/"), max_call_stack_depth)
        operation.relocate(location)
    if source_location.detail() is Detail.NONE:
        source_location.set_detail(Detail.SCOPES)
    return True


def _operation_of(last: Entry, vid: int) -> Operation | None:
    """The operation that computes the value ``vid`` in the step that ends with ``last``; None for an input."""
    entry: Entry | None = last
    while entry is not None and entry.first > vid:
        entry = entry.parent
    return entry if isinstance(entry, Operation) else None


def _in_scope(where: SourceLocation | None, scope: str, depth: int) -> SourceLocation:
    """``where`` with another scope, and at most ``depth`` frames unless that is negative."""
    if where is None:
        return SourceLocation((), None, scope, False, False)
    frames = where.frames if depth < 0 else where.frames[:depth]
    inner = where.inner if depth else None
    return SourceLocation(frames, inner, scope, where.optimizer, where.backward)


__all__ = [
    "_get_allow_execution", "_get_current_graph_name", "_get_use_eager_mode",
    "_get_xla_all_numbers_special_scalars", "_get_xla_enable_device_data_cache",
    "_get_xla_handle_special_scalars", "_set_allow_execution", "_set_current_graph_name",
    "_set_use_eager_mode", "_set_xla_all_numbers_special_scalars", "_set_xla_custom_op_name_prefix",
    "_set_xla_enable_device_data_cache", "_set_xla_handle_special_scalars",
    "_xla_get_enable_alias_with_buffer_donor_config",
    "_xla_set_enable_alias_with_buffer_donor_config",
]  # fmt: skip
