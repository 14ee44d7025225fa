"""Asks an awaited process where it is; its watchdog answers, even if its main thread is stuck.

A waiting process puts a question into the coordinator's store, and the awaited process answers as long as
there are questions. Nothing is written while no process waits.
"""

from __future__ import annotations

from typing import Final

from xla_core.extension_api import jobs
from xla_dist.job_health.thread_states import Condition

_ASKED: Final = "xla/asked"
_ANSWERS: Final = "xla/answers"

MSG_WHERE: Final = "; it is at {place}, {doing}"
MSG_SILENT: Final = "; it does not say where it is: something keeps its interpreter busy"
MSG_STACK: Final = "\nOrdinal {ordinal} is at\n{stack}"


class Questions:
    """The questions of replica ``me``: at most one to each other replica at a time."""

    def __init__(self, me: int) -> None:
        self._me = me
        self._open: set[int] = set()

    def ask(self, other: int, what: str) -> None:
        """Ask ``other``, which is awaited at ``what``; repeated calls cost nothing."""
        if other not in self._open:
            self._open.add(other)
            jobs.withdraw(f"{_ANSWERS}/{other}")  # an old answer
            jobs.publish(f"{_ASKED}/{other}/{self._me}", what.encode())

    def close(self) -> None:
        """Withdraw all questions."""
        while self._open:
            jobs.withdraw(f"{_ASKED}/{self._open.pop()}/{self._me}")


def asked(ordinal: int) -> dict[int, str]:
    """The replicas that wait for replica ``ordinal``, and the calls in which they wait."""
    questions = jobs.published(f"{_ASKED}/{ordinal}")
    return {int(name): data.decode() for name, data in questions.items()}


def answer(ordinal: int, condition: Condition) -> None:
    """Publish where replica ``ordinal``, this one, is."""
    jobs.publish(f"{_ANSWERS}/{ordinal}", condition.encode())


def withdraw_answer(ordinal: int) -> None:
    """Withdraw the answer of replica ``ordinal``, for which no replica waits any longer."""
    jobs.withdraw(f"{_ANSWERS}/{ordinal}")


def where(ordinal: int) -> str:
    """The end of a warning: the line at which replica ``ordinal`` is."""
    data = jobs.lookup(f"{_ANSWERS}/{ordinal}")
    if data is None:
        return MSG_SILENT
    condition = Condition.decode(data)
    return MSG_WHERE.format(place=condition.place, doing=condition.doing)


def stack(ordinal: int) -> str:
    """The end of a final message: the stack of replica ``ordinal``, if it has answered."""
    data = jobs.lookup(f"{_ANSWERS}/{ordinal}")
    if data is None:
        return MSG_SILENT
    return MSG_STACK.format(ordinal=ordinal, stack=Condition.decode(data).stack)
