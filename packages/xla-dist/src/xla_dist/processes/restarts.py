"""Restarts of a job: after one process has died, all are started again, a limited number of times.

The new attempt has new processes and a new coordinator. It continues from what the user's function finds on disk,
its last complete checkpoint, and reuses compiled programs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Final, Protocol

from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from xla_core.support import flags
from xla_dist.settings import RESTART_COUNT

logger = logging.getLogger(__name__)

_TORCHRUN: Final = "TORCHELASTIC_RESTART_COUNT"

MSG_AGAIN: Final = "attempt %d of %d failed: %s\nStarting the job again (restart %d of %d)."
MSG_NO_MORE: Final = "attempt %d of %d failed as well: no restarts are left"
MSG_NUMBER: Final = "max_restarts={got!r}: expected a whole number, 0 or more"
MSG_THREADS: Final = (
    "max_restarts={got} with debug_single_process=True: threads cannot be started again after their process has "
    "died; leave out one of the two arguments"
)
TERMINATED: Final = 128 + signal.SIGTERM


class Joined(Protocol):
    """A job that has been started."""

    def join(self) -> bool:
        """Wait until the job ends. Raises ProcessRaisedException or ProcessExitedException if it fails."""
        ...


def restart_count() -> int:
    """How often this job has been started again after a failure: 0 in the first attempt.

    Counts the restarts of ``torch_xla.launch(..., max_restarts=n)``, or of torchrun's ``--max-restarts``. The
    number is the same in all processes of the job.
    """
    of_torchrun = os.environ.get(_TORCHRUN, "0")
    return RESTART_COUNT.get() or (int(of_torchrun) if of_torchrun.isdecimal() else 0)


def check(max_restarts: int, threads: bool) -> None:
    """Raise ValueError if ``max_restarts`` is no number of restarts, or if ``threads`` would be restarted."""
    if not isinstance(max_restarts, int) or max_restarts < 0:
        raise ValueError(MSG_NUMBER.format(got=max_restarts))
    if max_restarts and threads:
        raise ValueError(MSG_THREADS.format(got=max_restarts))


def run(begin: Callable[[Mapping[str, str]], Joined], max_restarts: int) -> None:
    """Start a job with ``begin(environment)`` and join it; after a failure, up to ``max_restarts`` times again.

    ``environment`` contains the variables that the attempt's processes need in addition. All attempts share the
    persistent cache of compiled programs, a temporary one if the user has set none. Raises what the
    last attempt raised: ProcessRaisedException or ProcessExitedException.
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
    """The variables of a temporary persistent cache for several attempts; none if the user has set a cache."""
    if not max_restarts or flags.CACHE_PATH.get():
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="xla-restarts-", ignore_cleanup_errors=True) as folder:
        yield {flags.CACHE_PATH.name: folder}


@contextlib.contextmanager
def passing_on_termination(processes: Iterable[BaseProcess]) -> Iterator[None]:
    """A block in which a SIGTERM for this process is sent on to ``processes``, which may save a checkpoint and end.

    After a SIGTERM the end of the block raises SystemExit with status 143. Does nothing if the program has a
    SIGTERM handler of its own, or in a thread other than the main thread.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    received: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        for process in processes:
            if process.is_alive():
                process.terminate()

    signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if received:
            raise SystemExit(TERMINATED)
