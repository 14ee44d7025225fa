"""Waiting for other replicas without hanging: pauses, a warning, who is awaited, an end."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Final

from xla_core import flags
from xla_dist import failures

logger = logging.getLogger(__name__)

WAIT_TIMEOUT: Final = flags.Flag(
    "XLA_DIST_WAIT_TIMEOUT",
    int,
    1800,
    "seconds that a rendezvous, or a program's first run, waits for living processes",
)
WARN_SECONDS: Final = 10.0

MSG_NOT_THERE: Final = "{what}: ordinal {waiting} has not arrived for {seconds:.0f} s{doing}"
MSG_GAVE_UP: Final = "{text} (XLA_DIST_WAIT_TIMEOUT)"
MSG_FINISHED: Final = (
    "{what}: ordinal {waiting} never arrives: it has finished. Every replica has to make the same "
    "calls"
)
MSG_CROSSED: Final = (
    "ordinal {me} waits at {what} for ordinal {waiting}, which waits at {doing}: both wait for "
    "ever. Every replica has to make the same calls in the same order"
)


class Patience:
    """Waiting for other replicas: pauses that grow, a warning, an end; and who has finished already.

    ``endless``: waiting for others is all right, however long (they still train).
    """

    def __init__(self, what: str, endless: bool = False) -> None:
        self.what = what
        self.endless = endless
        self.started = self.checked = time.monotonic()
        self.warned = False
        self.pause = 0.0005
        self._waiting = failures.waiting(what)

    def __enter__(self) -> Patience:
        self._waiting.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._waiting.__exit__(*details)

    def wait(self, missing: Sequence[int]) -> None:
        """Pause once while ``missing`` replicas are awaited.

        Raises RuntimeError when one of them has finished, or the time is over.
        """
        now = time.monotonic()
        waited = now - self.started
        if now - self.checked > 1.0 and not self.endless:
            self.checked = now
            self._check(missing, waited)
        time.sleep(self.pause)
        self.pause = min(self.pause * 1.5, 0.05)

    def _check(self, missing: Sequence[int], waited: float) -> None:
        gone = sorted(failures.finished() & set(missing))
        if gone:
            raise RuntimeError(MSG_FINISHED.format(what=self.what, waiting=gone[0]))
        if waited > WARN_SECONDS and not self.warned:
            self.warned = True
            logger.warning(self._text(missing, waited))
        if waited > WAIT_TIMEOUT.get():
            raise RuntimeError(MSG_GAVE_UP.format(text=self._text(missing, waited)))

    def _text(self, missing: Sequence[int], waited: float) -> str:
        first = missing[0]
        doing = failures.others_wait_for().get(first)
        suffix = f"; it waits at {doing}" if doing else ""
        return MSG_NOT_THERE.format(what=self.what, waiting=first, seconds=waited, doing=suffix)
