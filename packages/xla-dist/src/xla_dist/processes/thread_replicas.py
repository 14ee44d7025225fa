"""Replicas as threads of one process, one per device: they meet in memory.

For debugging (``torch_xla.launch(..., debug_single_process=True)``) and for ``DataParallel``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from xla_core.extension_api import runtime
from xla_dist.settings import WAIT_TIMEOUT, WARN_AFTER

logger = logging.getLogger(__name__)

MSG_DIFFERENT: Final = (
    "the replicas run different programs:\n{sides}\nEvery replica has to call the same collectives "
    "in the same order; look for a branch that depends on the ordinal, or on data, around the call."
)
MSG_MISSING: Final = (
    "ordinal {me} waits at {what}, and ordinal {missing} does not arrive: {why}"
)  # fmt: skip
MSG_ALONE: Final = (
    "ordinal %d waits at %s for the threads of ordinal %s, for %.0f s. A process with several devices is as many "
    "replicas only where each has a thread: torch_xla.launch starts a process for each of them"
)
MSG_SEVERAL: Final = (
    "{devices}: in a job of {count} processes, each of them is one replica, on its device {own}. Start one "
    "process per device (torch_xla.launch, or torchrun with as many processes as devices, of which each "
    "shows one), or use SPMD mode"
)


class Team:
    """The threads that are replicas of each other; ``meet`` is where they wait for each other."""

    def __init__(self, devices: Sequence[int]) -> None:
        self.devices = tuple(devices)
        self._condition = threading.Condition()
        self._begin()
        self._round = 0
        self._results: list[Any] = []
        self._failed: dict[int, BaseException | None] = {}

    def _begin(self) -> None:
        self._given: dict[int, Any] = {}
        self._said: dict[int, str] = {}

    def meet(
        self,
        ordinal: int,
        what: str,
        given: object,
        action: Callable[[list[object]], object],
    ) -> Any:
        """Wait for all threads; the last calls ``action`` with what each has given, for all of them.

        Raises RuntimeError when they meet for different things (``what``), or one has ended.
        """
        with self._condition:
            self._given[ordinal], self._said[ordinal] = given, what
            if len(self._given) == len(self.devices):
                return self._all_here(action)
            wanted = self._round
            self._condition.notify_all()
            arrived = self._wait(ordinal, what, wanted)
            if self._round > wanted:
                return self._outcome()
            raise self._missing(ordinal, what, arrived)

    def _wait(self, ordinal: int, what: str, wanted: int) -> bool:
        """Wait until all have come, or one has ended, with a warning on the way; False when the time is over."""
        over = lambda: self._round > wanted or bool(self._failed)  # noqa: E731
        began, limit = time.monotonic(), WAIT_TIMEOUT.get()
        if self._condition.wait_for(over, timeout=min(WARN_AFTER.get(), limit)):
            return True
        missing = ", ".join(str(i) for i in range(len(self.devices)) if i not in self._given)
        logger.warning(MSG_ALONE, ordinal, what, missing, time.monotonic() - began)
        return self._condition.wait_for(over, timeout=max(began + limit - time.monotonic(), 0.0))

    def _all_here(self, action: Callable[[list[object]], object]) -> object:
        order = range(len(self.devices))
        try:
            if len(set(self._said.values())) > 1:
                sides = "\n".join(f"  ordinal {i}: {self._said[i]}" for i in order)
                raise RuntimeError(MSG_DIFFERENT.format(sides=sides))
            self._results = [action([self._given[i] for i in order]), None]
        except Exception as error:  # raised in every thread, as each waits for the outcome
            self._results = [None, error]
        self._begin()
        self._round += 1
        self._condition.notify_all()
        return self._outcome()

    def _outcome(self) -> object:
        result, error = self._results
        if error is not None:
            raise RuntimeError(str(error)) from error
        return result

    def _missing(self, ordinal: int, what: str, arrived: bool) -> RuntimeError:
        missing = next(i for i in range(len(self.devices)) if i not in self._given)
        culprit = next(iter(self._failed), missing)
        cause = self._failed.get(culprit)
        why = f"it has ended ({type(cause).__name__}: {cause})" if cause else "it has finished"
        if not arrived:
            why = f"for {WAIT_TIMEOUT.get()} s (XLA_DIST_WAIT_TIMEOUT)"
        text = MSG_MISSING.format(me=ordinal, what=what, missing=culprit, why=why)
        return RuntimeError(text)

    def leave(self, ordinal: int, error: BaseException | None) -> None:
        """A thread has ended: threads that wait for it stop waiting."""
        with self._condition:
            self._failed[ordinal] = error
            self._condition.notify_all()


_teams: dict[tuple[int, ...], Team] = {}


def team_of(devices: Sequence[int]) -> Team | None:
    """The team of the threads on these devices, if this process has them all."""
    ids = tuple(devices)
    team = _teams.get(ids)
    if team is None and len(ids) > 1:
        mine = {trace.backend.placement.devices[0] for trace in runtime.traces()}
        if mine.issuperset(ids):
            team = _teams.setdefault(ids, Team(ids))
    return team


def replicas_with(devices: Sequence[torch.device | str]) -> tuple[int, ...]:
    """The ids of the replicas, in ordinal order, when this process drives ``devices`` of its own.

    Alone: these devices, none where there is just one. In a job of several processes: those of all
    processes. Raises NotImplementedError for other devices than the one that this process has in the job.
    """
    traces = [runtime.trace_of(d) for d in devices]
    ids = tuple(trace.backend.placement.devices[0] for trace in traces)
    everyone = runtime.process_replicas()
    if not everyone:
        return ids if len(ids) > 1 else ()
    if len(ids) > 1 or ids[0] not in everyone:
        mine = {t.backend.placement.devices[0]: t.device for t in runtime.traces()}
        own = next(str(mine[i]) for i in everyone if i in mine)
        names = ", ".join(map(str, devices))
        raise NotImplementedError(MSG_SEVERAL.format(devices=names, count=len(everyone), own=own))
    return everyone


def run_threads(
    devices: Sequence[torch.device], function: Callable[[int], object]
) -> list[Any]:  # fmt: skip
    """Call ``function(ordinal)`` in a thread per device, as replicas; their results, in order.

    In a job of several processes the replicas are those of all processes, and ``devices`` is one device.
    Raises what the first failing thread raised. Afterwards the replicas are those from before.
    """
    replicas = replicas_with(devices)
    ids = tuple(runtime.trace_of(d).backend.placement.devices[0] for d in devices)
    before = runtime.trace_of(devices[0]).backend.replicas
    team = _teams[ids] = Team(ids)
    runtime.set_replicas(replicas)
    results: list[Any] = [None] * len(ids)
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
        runtime.set_replicas(before)
        _teams.pop(ids, None)
    if errors:
        raise next(iter(errors.values()))
    return results
