"""Jobs that begin again: after a process has died, all of them are restarted, a limited number of times.

Nothing of the former attempt is taken over: its other processes have ended, the coordinator is a new one. What
goes on is what the function finds on the disk, its last complete checkpoint, and compiled programs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Final, Protocol

from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from xla_core.support import flags
from xla_dist.settings import RESTART_COUNT

logger = logging.getLogger(__name__)

_TORCHRUN: Final = "TORCHELASTIC_RESTART_COUNT"

MSG_AGAIN: Final = "attempt %d of %d ended after %s\nStarting the job again (restart %d of %d)."
MSG_NO_MORE: Final = "attempt %d of %d ended as well: there are no restarts left"
MSG_NUMBER: Final = "max_restarts={got!r}: expected a whole number from 0"
MSG_THREADS: Final = (
    "max_restarts={got} with debug_single_process=True: threads cannot be started again when their process has "
    "died; leave one of the two out"
)
TERMINATED: Final = 128 + signal.SIGTERM


class Joined(Protocol):
    """A job that has been started."""

    def join(self) -> bool:
        """Wait for its end; raises what ended it."""
        ...


def restart_count() -> int:
    """How often this job was started again after a failure: 0 at the first attempt, in all processes alike.

    By ``torch_xla.launch(..., max_restarts=n)``, or by torchrun's ``--max-restarts``.
    """
    elsewhere = os.environ.get(_TORCHRUN, "0")
    return RESTART_COUNT.get() or (int(elsewhere) if elsewhere.isdecimal() else 0)


def check(max_restarts: int, threads: bool) -> None:
    """Raise ValueError for a number that is none, and for restarts of threads."""
    if not isinstance(max_restarts, int) or max_restarts < 0:
        raise ValueError(MSG_NUMBER.format(got=max_restarts))
    if max_restarts and threads:
        raise ValueError(MSG_THREADS.format(got=max_restarts))


def run(begin: Callable[[Mapping[str, str]], Joined], max_restarts: int) -> None:
    """Start a job with ``begin(environment)`` and join it, again after each failure up to ``max_restarts`` times.

    Programs that were compiled are kept for the next attempt: in the persistent cache, or in a temporary one
    where the user has set none. Raises what the last attempt ended with.
    """
    with _cache(max_restarts) as cache:
        for attempt in range(max_restarts + 1):
            try:
                begin({RESTART_COUNT.name: str(attempt), **cache}).join()
                return
            except (ProcessRaisedException, ProcessExitedException) as error:
                if attempt == max_restarts:
                    if attempt:
                        logger.warning(MSG_NO_MORE, attempt + 1, max_restarts + 1)
                    raise
                numbers = attempt + 1, max_restarts
                logger.warning(
                    MSG_AGAIN, attempt + 1, max_restarts + 1, f"{error}".strip(), *numbers
                )


@contextlib.contextmanager
def _cache(max_restarts: int) -> Iterator[dict[str, str]]:
    """A cache for the programs of several attempts, if the user has none."""
    if not max_restarts or flags.CACHE_PATH.get():
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="xla-restarts-", ignore_cleanup_errors=True) as folder:
        yield {flags.CACHE_PATH.name: folder}


@contextlib.contextmanager
def passing_on_termination(processes: Iterable[Any]) -> Iterator[None]:
    """Inside, SIGTERM goes to the ``processes``, which may take a checkpoint and end; this one ends after them.

    With SystemExit, of status 143, at the end of the block. Nothing where the program handles SIGTERM itself, or
    outside of the main thread.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    asked: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        for process in processes:
            if process.is_alive():
                process.terminate()

    signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if asked:
            raise SystemExit(TERMINATED)
