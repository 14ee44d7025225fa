"""Injects faults, to test what a job does when one of its processes fails.

``XLA_DIST_FAULT=kill:1:20`` kills ordinal 1 of any script's job at the end of its step 20, in the first attempt of
a job that is restarted. ``strike("kill")`` kills the calling process immediately.
"""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, NoReturn

import torch

from xla_core.contract import events
from xla_core.extension_api import jobs, runtime
from xla_dist.collectives import model_collectives
from xla_dist.processes import rendezvous
from xla_dist.processes.restarts import restart_count
from xla_dist.settings import FAULT

logger = logging.getLogger(__name__)

_COORDINATOR: Final = b"xla_core.jax_bridge.coordinator_process"
_NAP_SECONDS: Final = 0.1
_SLOW_SECONDS: Final = 0.3
_DISK_SECONDS: Final = 60.0

MSG_RAISED: Final = "a fault on purpose (xla_dist.testing.faults)"
MSG_KIND: Final = "there is no fault {kind!r}: choose one of {known}"
MSG_PLAN: Final = "XLA_DIST_FAULT is KIND:ORDINAL:STEP, such as kill:1:20, not {text!r}"
MSG_NO_COORDINATOR: Final = "the job's coordinator does not run on this host"


_logged: Final[set[str]] = set()


class InjectedFault(RuntimeError):
    """The exception that the fault ``raise`` raises."""


class Plan(NamedTuple):
    """The fault ``kind`` occurs in replica ``ordinal`` when it ends its step number ``step``, counted from 1."""

    kind: str
    ordinal: int
    step: int

    @classmethod
    def of_text(cls, text: str) -> Plan:
        """The plan for the text ``KIND:ORDINAL:STEP``. Raises ValueError for any other text."""
        kind, _, rest = text.partition(":")
        ordinal, _, step = rest.partition(":")
        if not (ordinal.isdecimal() and step.isdecimal() and int(step) > 0):
            raise ValueError(MSG_PLAN.format(text=text))
        _check(kind)
        return cls(kind, int(ordinal), int(step))


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(MSG_KIND.format(kind=kind, known=", ".join(KINDS)))


def strike(kind: str) -> None:
    """Inject the fault ``kind``, one of ``KINDS``, into this process now. Raises ValueError for another kind.

    ``raise`` raises InjectedFault. Only ``program``, ``slow``, ``full_disk`` and ``slow_disk`` return.
    """
    _check(kind)
    if kind not in _logged:
        _logged.add(kind)
        logger.warning("xla-dist: a fault on purpose: %s", kind)
    KINDS[kind]()


def schedule(plan: Plan) -> Callable[[], None]:
    """Inject the fault of ``plan`` in the process that it names; returns a function that cancels the plan.

    The fault ``slow`` occurs at the planned step and all later ones, any other fault once.
    """
    count = 0

    def marked(_event: events.StepMarked) -> None:
        nonlocal count
        count += 1
        due = count == plan.step or (plan.kind == "slow" and count > plan.step)
        if due and plan.ordinal == runtime.global_ordinal():
            strike(plan.kind)

    return events.subscribe(events.StepMarked, marked)


def of_environment() -> None:
    """Schedule the plan in ``XLA_DIST_FAULT``, if there is one, unless the job has been restarted."""
    text = FAULT.get()
    if text:
        plan = Plan.of_text(text)
        if restart_count() == 0:
            schedule(plan)


# -- the kinds ------------------------------------------------------------------------------------


def _raise() -> NoReturn:
    raise InjectedFault(MSG_RAISED)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang() -> NoReturn:
    while True:
        time.sleep(_NAP_SECONDS)


def _lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _slow() -> None:
    time.sleep(_SLOW_SECONDS)


def _collective() -> None:
    rendezvous.rendezvous("a fault on purpose")


def _program() -> None:
    # a size that no collective of a script is likely to have
    model_collectives.all_reduce("sum", torch.ones(6007, device="xla")).cpu()


def _coordinator() -> NoReturn:
    _to_coordinator(signal.SIGKILL)


def _coordinator_stop() -> NoReturn:
    _to_coordinator(signal.SIGSTOP)


def _to_coordinator(number: int) -> NoReturn:
    pid = _serving()
    if pid is None:
        launcher = multiprocessing.parent_process()
        pid = launcher.pid if launcher is not None else None
    if pid is None:
        raise RuntimeError(MSG_NO_COORDINATOR)
    os.kill(pid, number)
    while True:  # until the watchdog notices
        time.sleep(_NAP_SECONDS)


def _full_disk() -> None:
    _flush_as(_refuse)


def _slow_disk() -> None:
    _flush_as(_take_long)


def _flush_as(behave: Callable[[], None]) -> None:
    """From now on each ``os.fsync`` of this process calls ``behave`` first: a disk reports its errors there."""
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        behave()
        flush(descriptor)

    os.fsync = fsync  # type: ignore[assignment]


def _refuse() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _take_long() -> None:
    time.sleep(_DISK_SECONDS)


def _serving() -> int | None:
    """The id of the separate process that runs this job's coordinator on this host; None if there is none."""
    connection = jobs.connection()
    address = connection.job.address if connection is not None else ""
    port = address.rpartition(":")[2].encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue  # it has just ended
        if _COORDINATOR in words and any(word.endswith(b":" + port) for word in words):
            return int(path.parent.name)
    return None


KINDS: Final[Mapping[str, Callable[[], None]]] = MappingProxyType(
    {
        "raise": _raise, "kill": _kill, "stop": _stop, "hang": _hang, "lock": _lock, "slow": _slow,
        "collective": _collective, "program": _program, "coordinator": _coordinator,
        "coordinator_stop": _coordinator_stop, "full_disk": _full_disk, "slow_disk": _slow_disk,
    }
)  # fmt: skip
"""The kinds of faults: ``raise`` raises an exception; ``kill`` and ``stop`` send SIGKILL and SIGSTOP.

``hang`` loops in Python for ever; ``lock`` waits for a lock that is never released; ``slow`` takes 0.3 s;
``collective`` calls a rendezvous, and ``program`` runs a collective, that no other process does; ``coordinator``
and ``coordinator_stop`` kill and stop the coordinator, or the launcher if it runs the coordinator; ``full_disk``
and ``slow_disk`` make each file that this
process writes from then on fail, or take a minute."""
