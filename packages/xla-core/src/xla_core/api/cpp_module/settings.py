"""Names of torch_xla's C++ module ``_XLAC`` that set how the process records, names and runs its steps."""

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
    "0 and 1 are always constants of a program here; what can be chosen is whether all numbers are: "
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
    """Let every number be a constant of the programs recorded from now on, or not (the default).

    A compiler then sees all of them in the program; a step with another number is another program. Seeds of
    random operators stay arguments.
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
    """With False what the calling thread has pending may not run: RuntimeError where it would."""
    for trace in runtime.traces():
        with trace.lock:
            trace.forbid(None if allow else MSG_FORBIDDEN)


def _get_current_graph_name() -> str:
    """The name of the graph that is being recorded, or an empty text."""
    return runtime.trace_of(None).graph_name or ""


def _set_current_graph_name(name: str) -> None:
    """Let debug output call what the calling thread records from now on ``name``; empty: nothing."""
    for trace in runtime.traces():
        with trace.lock:
            trace.name_graph(name or None)


def _get_use_eager_mode() -> bool:
    """Whether every operator runs when it is called."""
    return eager_mode.is_on()


def _set_use_eager_mode(on: bool) -> None:
    """Run every operator when it is called, or record again; what is pending is run first."""
    eager_mode.switch(bool(on))


def _xla_get_enable_alias_with_buffer_donor_config(device: str = "") -> bool:
    """Whether marks of ``_set_buffer_donation`` count; one setting for all devices."""
    del device
    return buffer_donation.aliasing()


def _xla_set_enable_alias_with_buffer_donor_config(
    enable_user_config_alias: bool = False, device: str = ""
) -> None:
    """Let marks of ``_set_buffer_donation`` count from now on, or not; one setting for all devices."""
    del device
    buffer_donation.set_aliasing(enable_user_config_alias)


# -- names in programs -----------------------------------------------------------------------------


def _set_xla_custom_op_name_prefix(
    tensor: torch.Tensor, prefix: str, max_call_stack_depth: int = -1
) -> bool:
    """Let the operation that makes ``tensor`` be called ``prefix`` + its name in programs made from now on.

    Returns False for a tensor that is no pending result of an operation. ``max_call_stack_depth`` is how many
    Python frames stay with it, from the inside: 0 none, a negative number all that are known.
    """
    if not isinstance(tensor, XLATensor):
        return False
    trace = tensor._s.trace
    with trace.lock, trace.turns.showing(tensor._s):
        if not trace.is_pending(tensor._s):
            return False
        maker = _maker(trace.cur, trace.value_of(tensor))
        if maker is None:
            return False
        maker.relocate(_named(maker.where, prefix.rstrip("/"), max_call_stack_depth))
    if source_location.detail() is Detail.NONE:
        source_location.set_detail(Detail.SCOPES)
    return True


def _maker(last: Entry, vid: int) -> Operation | None:
    """The operation that computes a value; None for an input."""
    entry: Entry | None = last
    while entry is not None and entry.first > vid:
        entry = entry.parent
    return entry if isinstance(entry, Operation) else None


def _named(where: SourceLocation | None, scope: str, depth: int) -> SourceLocation:
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
