"""Tracebacks that end at the user's line: the frames of PyTorch and of this project are left out.

Nothing is changed behind anybody's back: a ``with`` block (or a decorator) shortens the tracebacks of the errors
that leave it, and of what caused them. Errors inside cost what they always did; nothing runs without one.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Self

from xla_debug import settings
from xla_debug.stacks import stack_frames


def shorten(error: BaseException) -> BaseException:
    """Leave only the user's frames in an error's traceback, and in those of its causes; returns the error.

    Where there is no line of the user's, a traceback stays whole; so do all with ``XLA_FULL_TRACEBACK=1``.
    """
    if settings.FULL_TRACEBACK.get():
        return error
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _of_user(one.__traceback__)
        waiting += [one.__cause__, one.__context__]
    return error


class short(contextlib.ContextDecorator):
    """A block, or a decorated function: errors that leave it have the user's lines only."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        if error is not None:
            shorten(error)


def _of_user(trace: types.TracebackType | None) -> types.TracebackType | None:
    kept = [
        entry
        for entry in _entries(trace)
        if stack_frames.is_user_file(entry.tb_frame.f_code.co_filename)
    ]
    shortened: types.TracebackType | None = None
    for entry in reversed(kept):
        shortened = types.TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shortened or trace


def _entries(trace: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
