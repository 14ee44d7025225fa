"""Eager mode: every operator runs when it is called, as a program of its own.

Switching it on replaces the table of handlers, so that recording costs nothing while it is off.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

from xla_core.execution import runtime
from xla_core.recording import xla_tensor as tensor_module
from xla_core.recording.xla_tensor import Handler
from xla_core.support import flags
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands


class _Depth(threading.local):
    value = 0


_depth = _Depth()
_state = {"on": False}
_lock = threading.Lock()


def is_on() -> bool:
    """Whether operators run one by one."""
    return _state["on"]


def switch(enable: bool) -> None:
    """Turn eager mode on or off for the process. Turning it on runs what is pending."""
    with _lock:
        if enable == _state["on"]:
            return
        if enable and runtime.started():
            _run_pending()
        tensor_module.set_handler_wrapper(_run_at_once if enable else None)
        _state["on"] = enable  # last, so that the switch can be tried again after an exception


@contextlib.contextmanager
def mode(enable: bool) -> Iterator[None]:
    """Eager mode on or off inside a ``with`` block."""
    former = _state["on"]
    try:
        try:
            switch(enable)
            yield
        finally:
            switch(former)
    finally:
        switch(former)  # again, in case an exception interrupted the line above


def _run_at_once(handler: Handler) -> Handler:
    """A version of ``handler`` that runs what it has recorded, unless another handler called it."""

    @functools.wraps(handler)
    def run(args: Operands, kwargs: NamedOperands | None) -> Operand:
        former = _depth.value
        try:
            try:
                _depth.value = former + 1
                result = handler(args, kwargs)
            finally:
                _depth.value = former
        finally:
            _depth.value = former  # again, in case an exception interrupted the line above
        if _state["on"] and not _depth.value:
            _run_pending()
        return result

    return run


def _run_pending() -> None:
    for trace in runtime.traces():
        with trace.lock:  # installs the calling thread's step; steps of other threads are not cut
            if trace.cur.depth:
                trace.flush_as_operators(_state["on"])


def switch_on_if_asked() -> None:
    """Turn eager mode on if ``XLA_USE_EAGER_DEBUG_MODE`` is set."""
    if flags.EAGER_DEBUG_MODE.get():
        switch(True)
