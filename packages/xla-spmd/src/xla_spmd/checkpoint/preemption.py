"""Being asked to end (SIGTERM): all processes take a checkpoint at the same step.

With a process group, the processes compare at every step whether any of them was asked. Without one, they use
the store of the job's coordination service: the notice of one process is there for all, each adds the step at
which it is, and the checkpoint is taken at the largest of these steps, which no process has passed.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

import torch
import torch.distributed as dist

from xla_core.extension_api import jobs
from xla_core.support import flight_ring

MSG_THREAD: Final = (
    "a CheckpointManager that takes a checkpoint when the process is asked to end has to be made in the main "
    "thread, which alone may handle SIGTERM; make it there, or pass chkpt_on_preemption=False"
)

MEETING: Final = "the agreement whether to take a checkpoint"

_NOTICE: Final = "xla-preemption/{watch}/notice"
_STEPS: Final = "xla-preemption/{watch}/steps"
_POLL_SECONDS: Final = 0.02

_asked: Final = threading.Event()
_former: list[Callable[[int, FrameType | None], object] | int | signal.Handlers | None] = []


class _Meeting:
    """What the processes of the job have agreed on since the last ``watch``, of which there were ``watches``."""

    watches = 0
    step: int | None = None


def watch() -> None:
    """Note SIGTERM from now on, instead of ending; a handler of the user's own is still called.

    Raises RuntimeError outside the main thread.
    """
    if _former:
        return
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(MSG_THREAD)
    _Meeting.watches += 1
    _Meeting.step = None
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


def reached_in_job(step: int) -> bool:
    """Whether the processes of the job take a checkpoint at ``step``; all of them call it at every step.

    True from the step on that they have agreed on. A process that is ahead of the others waits until each has
    come to its next call.
    """
    connection = jobs.connection()
    if connection is None or connection.job.count == 1:
        return _asked.is_set()
    if _Meeting.step is None:
        _Meeting.step = _agreed_step(connection.job, step)
    return _Meeting.step is not None and step >= _Meeting.step


def _agreed_step(job: jobs.Job, step: int) -> int | None:
    """The largest of the steps at which the processes are; None as long as none of them was asked to end."""
    notice, steps = (key.format(watch=_Meeting.watches) for key in (_NOTICE, _STEPS))
    if _asked.is_set():
        jobs.publish(notice, b"")
    elif jobs.lookup(notice) is None:
        return None
    jobs.publish(f"{steps}/{job.index}", str(step).encode())
    record = flight_ring.begin(flight_ring.MEET, MEETING)
    try:
        while len(arrived := jobs.published(steps)) < job.count:
            time.sleep(_POLL_SECONDS)
    finally:
        flight_ring.waited(record)
    return max(map(int, arrived.values()))


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
