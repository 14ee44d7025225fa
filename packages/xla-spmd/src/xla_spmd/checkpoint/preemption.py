"""Being asked to end (SIGTERM): the next step of every process is the one to take a checkpoint at."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist

from xla_core.support import flight_ring

MSG_THREAD: Final = (
    "a CheckpointManager that takes a checkpoint when the process is asked to end has to be made in the main "
    "thread, which alone may handle SIGTERM; make it there, or pass chkpt_on_preemption=False"
)

MEETING: Final = "the agreement whether to take a checkpoint"

_asked: Final = threading.Event()
_former: list[Any] = []


def watch() -> None:
    """Note SIGTERM from now on, instead of ending; a handler of the user's own is still called.

    Raises RuntimeError outside the main thread.
    """
    if _former:
        return
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(MSG_THREAD)
    _former.append(signal.signal(signal.SIGTERM, _note))


def unwatch() -> None:
    """Let SIGTERM do what it did before ``watch``; what was asked so far is forgotten.

    Raises RuntimeError outside the main thread.
    """
    if not _former:
        return
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(MSG_THREAD)
    former = _former.pop()
    signal.signal(signal.SIGTERM, signal.SIG_DFL if former is None else former)
    _asked.clear()


def is_watching() -> bool:
    """Whether SIGTERM is noted."""
    return bool(_former)


def _note(number: int, frame: FrameType | None) -> None:
    _asked.set()
    if callable(_former[0]):
        _former[0](number, frame)


def reached(group: dist.ProcessGroup | None) -> bool:
    """Whether any process of ``group`` (None: this one) was asked to end; all of them get one answer."""
    if group is None:
        return _asked.is_set()
    asked = torch.tensor(int(_asked.is_set()))
    record = flight_ring.begin(flight_ring.MEET, MEETING)
    try:
        dist.all_reduce(asked, dist.ReduceOp.MAX, group)
    finally:
        flight_ring.waited(record)
    return bool(asked)
