"""Calls functions when a tensor's value is computed, while the script goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from xla_core.dispatch.transfers import materialise
from xla_core.execution import runtime
from xla_core.recording.xla_tensor import XLATensor

MSG_NOT_XLA = "a callback waits for a tensor on an xla device, got one on {device}"


def when_ready(tensor: torch.Tensor, callback: Callable[[], object]) -> None:
    """Call ``callback()`` from another thread as soon as the value of ``tensor`` is computed.

    The pending operations of its device are launched. The process does not end before the call. Raises TypeError
    for a tensor that is not on ``xla``.
    """
    if not isinstance(tensor, XLATensor):
        raise TypeError(MSG_NOT_XLA.format(device=tensor.device))
    trace = tensor._s.trace
    with trace.lock:
        buffer = materialise(trace, tensor._s)

    def work() -> None:
        runtime.client().wait([] if buffer is None else [buffer])  # None: never written, so zeros
        callback()

    # not a daemon: a daemon thread that returns from the wait while Python ends would abort the process
    threading.Thread(target=work, name="xla-ready").start()


def on_ready_callback(tensor: torch.Tensor, callback: Callable[[torch.Tensor], object]) -> None:
    """Call ``callback(tensor)`` from another thread as soon as the value of ``tensor`` is computed.

    See ``when_ready``.
    """
    when_ready(tensor, lambda: callback(tensor))


def on_ready_event(tensor: torch.Tensor) -> threading.Event:
    """An event that is set as soon as the value of ``tensor`` is computed."""
    event = threading.Event()
    when_ready(tensor, event.set)
    return event
