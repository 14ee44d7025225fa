"""Replicas that are threads of one process, one per device, and exchange values in memory.

``torch_xla.launch(..., debug_single_process=True)`` and ``DataParallel`` use them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import torch

from xla_core.contract.foreign_values import ForeignObject
from xla_core.extension_api import runtime
from xla_dist.settings import WAIT_TIMEOUT, WARN_AFTER

logger = logging.getLogger(__name__)

T = TypeVar("T")

MSG_DIFFERENT: Final = (
    "the replicas run different programs:\n{sides}\nEvery replica has to call the same collectives "
    "in the same order; look for a branch that depends on the ordinal, or on data, around the call."
)
MSG_MISSING: Final = (
    "ordinal {me} waits at {what}, and ordinal {missing} does not arrive: {why}"
)  # fmt: skip
MSG_ALONE: Final = (
    "ordinal %d has waited at %s for the threads of ordinal %s for %.0f s. Several devices of one process are "
    "replicas only if each has its own thread; torch_xla.launch starts a process for each device"
)
MSG_SEVERAL: Final = (
    "{devices}: in a job of {count} processes, each process is one replica, and the device of this one is {own}. "
    "Start one process per device (torch_xla.launch, or torchrun with as many processes as devices, each of "
    "which sees one device), or use SPMD mode"
)


class Team:
    """The threads that are the replicas of one process, one for each of ``devices`` (ids, in ordinal order).

    They meet in ``exchange``, again and again: each meeting is a round.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        self.devices = tuple(devices)
        self._condition = threading.Condition()
        self._begin_round()
        self._round = 0
        self._outcome: tuple[ForeignObject, Exception | None] = (None, None)
        # the threads that have ended, with what they raised
        self._ended: dict[int, BaseException | None] = {}

    def _begin_round(self) -> None:
        self._values: dict[int, ForeignObject] = {}
        self._operations: dict[int, str] = {}

    def exchange(
        self,
        ordinal: int,
        what: str,
        value: object,
        action: Callable[[list[ForeignObject]], T],
    ) -> T:
        """Wait for all threads; returns ``action`` of the list of their values, in the order of their ordinals.

        The thread that comes last calls ``action``, and all return its result. ``ordinal`` is the calling thread's,
        ``what`` describes the operation. Raises RuntimeError if the threads' operations differ, if
        ``action`` raises, if a thread has ended, or after ``XLA_DIST_WAIT_TIMEOUT`` seconds.
        """
        with self._condition:
            self._values[ordinal], self._operations[ordinal] = value, what
            if len(self._values) == len(self.devices):
                return self._end_round(action)
            this_round = self._round
            self._condition.notify_all()
            in_time = self._wait(ordinal, what, this_round)
            if self._round > this_round:
                return self._result()
            raise self._missing(ordinal, what, in_time)

    def _wait(self, ordinal: int, what: str, this_round: int) -> bool:
        """Wait until the round is over or a thread has ended, and warn on the way; False after the time limit."""
        over = lambda: self._round > this_round or bool(self._ended)  # noqa: E731
        began, limit = time.monotonic(), WAIT_TIMEOUT.get()
        if self._condition.wait_for(over, timeout=min(WARN_AFTER.get(), limit)):
            return True
        missing = ", ".join(str(i) for i in range(len(self.devices)) if i not in self._values)
        logger.warning(MSG_ALONE, ordinal, what, missing, time.monotonic() - began)
        return self._condition.wait_for(over, timeout=max(began + limit - time.monotonic(), 0.0))

    def _end_round(self, action: Callable[[list[ForeignObject]], T]) -> T:
        """Compute the round's result, in the thread that has come last, and wake up the others."""
        order = range(len(self.devices))
        try:
            if len(set(self._operations.values())) > 1:
                sides = "\n".join(f"  ordinal {i}: {self._operations[i]}" for i in order)
                raise RuntimeError(MSG_DIFFERENT.format(sides=sides))
            self._outcome = (action([self._values[i] for i in order]), None)
        except Exception as error:  # every thread waits for the outcome, and raises it
            self._outcome = (None, error)
        self._begin_round()
        self._round += 1
        self._condition.notify_all()
        return self._result()

    def _result(self) -> ForeignObject:
        result, error = self._outcome
        if error is not None:
            raise RuntimeError(str(error)) from error
        return result

    def _missing(self, ordinal: int, what: str, in_time: bool) -> RuntimeError:
        missing = next(i for i in range(len(self.devices)) if i not in self._values)
        culprit = next(iter(self._ended), missing)
        cause = self._ended.get(culprit)
        why = f"it has ended ({type(cause).__name__}: {cause})" if cause else "it has finished"
        if not in_time:
            why = f"for {WAIT_TIMEOUT.get()} s (XLA_DIST_WAIT_TIMEOUT)"
        text = MSG_MISSING.format(me=ordinal, what=what, missing=culprit, why=why)
        return RuntimeError(text)

    def leave(self, ordinal: int, error: BaseException | None) -> None:
        """Note that the thread of ``ordinal`` has ended, with ``error`` or without, and wake up those who wait."""
        with self._condition:
            self._ended[ordinal] = error
            self._condition.notify_all()


_teams: dict[tuple[int, ...], Team] = {}


def team_of(devices: Sequence[int]) -> Team | None:
    """The team of the threads on these devices (ids).

    None if this process does not have all of them, or for one.
    """
    ids = tuple(devices)
    team = _teams.get(ids)
    if team is None and len(ids) > 1:
        mine = {trace.backend.placement.devices[0] for trace in runtime.traces()}
        if mine.issuperset(ids):
            team = _teams.setdefault(ids, Team(ids))
    return team


def replicas_with(devices: Sequence[torch.device | str]) -> tuple[int, ...]:
    """The device ids of all replicas, in ordinal order, if ``devices`` are this process's replicas.

    Without a job these are the ids of ``devices``, none for a single device. In a job of several processes they are
    the ids of all processes' devices. Raises NotImplementedError if ``devices`` is not this process's
    one device in its job.
    """
    traces = [runtime.trace_of(d) for d in devices]
    ids = tuple(trace.backend.placement.devices[0] for trace in traces)
    of_job = runtime.process_replicas()
    if not of_job:
        return ids if len(ids) > 1 else ()
    if len(ids) > 1 or ids[0] not in of_job:
        mine = {t.backend.placement.devices[0]: t.device for t in runtime.traces()}
        own = next(str(mine[i]) for i in of_job if i in mine)
        names = ", ".join(map(str, devices))
        raise NotImplementedError(MSG_SEVERAL.format(devices=names, count=len(of_job), own=own))
    return of_job


def run_threads(
    devices: Sequence[torch.device], function: Callable[[int], T]
) -> list[T]:  # fmt: skip
    """Call ``function(ordinal)`` in one thread per device, each of which is a replica.

    Returns their results in order.
    In a job of several processes, ``devices`` is this process's one device. Sets the replicas for the time of the
    call. Raises what the first thread that failed raised.
    """
    replicas = replicas_with(devices)
    ids = tuple(runtime.trace_of(d).backend.placement.devices[0] for d in devices)
    previous = runtime.trace_of(devices[0]).backend.replicas
    team = _teams[ids] = Team(ids)
    runtime.set_replicas(replicas)
    results: list[ForeignObject] = [None] * len(ids)
    errors: dict[int, BaseException] = {}

    def work(ordinal: int) -> None:
        error: BaseException | None = None
        try:
            with runtime.current_device(devices[ordinal].index or 0):
                results[ordinal] = function(ordinal)
        except BaseException as raised:  # raised again in the calling thread
            error = errors[ordinal] = raised
        finally:
            team.leave(ordinal, error)

    threads = [
        threading.Thread(target=work, args=(i,), name=f"xla-replica-{i}") for i in range(len(ids))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        runtime.set_replicas(previous)
        _teams.pop(ids, None)
    if errors:
        raise next(iter(errors.values()))
    return results
