"""Notices whether a recorded step prints, which a replay would not do."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from xla_core.capture import errors
from xla_core.capture.errors import refuse
from xla_core.recording import source_location
from xla_core.torch_bridge.operands import Operand, Tree


class Noticed:
    """The first line of the user's program that printed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.place: tuple[str, int] | None = None

    def check(self) -> None:
        """Raise CaptureError if something was printed."""
        if self.place is not None:
            raise refuse(errors.MSG_PRINTS, self.place, name=self._name)


@contextmanager
def noticing_prints(name: str) -> Iterator[Noticed]:
    """A block in which calls of ``print`` by the calling thread are noticed; they still print."""
    noticed = Noticed(name)
    thread, former = get_ident(), builtins.print

    def noticing(*args: Operand, **kwargs: Tree) -> None:
        if get_ident() == thread and noticed.place is None:
            noticed.place = source_location.recording_line()
        former(*args, **kwargs)

    builtins.print = noticing
    try:
        yield noticed
    finally:
        if builtins.print is noticing:
            builtins.print = former
