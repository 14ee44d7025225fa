"""Finds the call that made pending operations run, from Python's stack."""

from __future__ import annotations

import enum
import sys
from types import FrameType
from typing import Final

from xla_core.extension_api.source_location import (
    COMPILE_MODULE,
    COMPILED_GRAPH_MODULE,
    SIZE_MODULES,
    Frame,
)
from xla_debug.stacks import stack_frames

_PROFILER: Final = "xla_debug.profiler"


class SyncCause(enum.Enum):
    """What made pending operations run, in torch_xla's words (torch_xla has one text for SIZE and VALUE)."""

    SYNC = "user torch_xla.sync"
    LOADER = "torch_xla.sync in parallel loader at step end"
    STEP_TRACE = "torch_xla.sync when exiting a profiler StepTrace region"
    DYNAMO_INPUTS = "torch_xla.sync when dynamo processing input graphs"
    COMPILE = "torch_xla.compile"
    COMPILE_CLEAR = "torch_xla.compile clear the pending graph prior calling the target function"
    DYNAMO_COMPILE = "dynamo is compiling a FX graph to HLO"
    DYNAMO_RUN = "dynamo is executing a compiled program"
    VALUE = "most likely user code trying to access tensor value before torch_xla.sync"
    SIZE = "an operator whose result's size depends on values, before torch_xla.sync"

    @property
    def ends_step(self) -> bool:
        """Whether this is an intended end of a step."""
        return self not in (SyncCause.VALUE, SyncCause.SIZE)


def current(start: FrameType | None = None) -> tuple[SyncCause, tuple[Frame, ...]]:
    """The cause of the flush that is running, and the user's frames that led to it, innermost first."""
    start = start or sys._getframe(1)
    own: list[tuple[str, str]] = []
    for frame in stack_frames.frames(start):
        filename = frame.f_code.co_filename
        if stack_frames.is_own_file(filename):
            own.append((frame.f_code.co_name, frame.f_globals.get("__name__", "")))
        elif stack_frames.is_user_file(filename):
            break  # frames further out have called the user's code, not the flush
    return _cause(own), stack_frames.user_frames(start, limit=64)


def _cause(own: list[tuple[str, str]]) -> SyncCause:
    """The cause that follows from this project's functions on the stack: their names and modules."""
    graph = {name for name, module in own if module == COMPILED_GRAPH_MODULE}
    if graph:
        if "_buffers" in graph:  # it computes arguments that are pending
            return SyncCause.DYNAMO_INPUTS
        return SyncCause.DYNAMO_COMPILE if "_record" in graph else SyncCause.DYNAMO_RUN
    if any("loader" in module.rpartition(".")[2] for _, module in own):
        return SyncCause.LOADER
    if any(module == _PROFILER for _, module in own):
        return SyncCause.STEP_TRACE
    if any(module == COMPILE_MODULE for _, module in own):
        entering = any(name in ("__enter__", "_clear_pending") for name, _ in own)
        return SyncCause.COMPILE_CLEAR if entering else SyncCause.COMPILE
    if any(name in ("sync", "mark_step", "optimizer_step") for name, _ in own):
        return SyncCause.SYNC
    sizes = any(module in SIZE_MODULES for _, module in own)
    return SyncCause.SIZE if sizes else SyncCause.VALUE
