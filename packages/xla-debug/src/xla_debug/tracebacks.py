"""Tracebacks with the user's lines only, without the frames of PyTorch and of this project.

They are shortened only where the user asks for it, by a ``with`` block or a decorator, when an error leaves the
block or the function. Without an error, this costs nothing.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Self

from xla_debug import settings
from xla_debug.stacks import stack_frames


def shorten(error: BaseException) -> BaseException:
    """Remove all but the user's frames from the tracebacks of ``error`` and of its causes, and return ``error``.

    A traceback without frames of the user's stays whole. With ``XLA_FULL_TRACEBACK=1`` all do.
    """
    if settings.FULL_TRACEBACK.get():
        return error
    seen: set[int] = set()
    to_shorten: list[BaseException | None] = [error]
    while to_shorten:
        current = to_shorten.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        current.__traceback__ = _of_user(current.__traceback__)
        to_shorten += [current.__cause__, current.__context__]
    return error


class short(contextlib.ContextDecorator):
    """A context manager or decorator: errors that leave the block or function have only the user's frames."""

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
    of_user = [
        entry
        for entry in _entries(trace)
        if stack_frames.is_user_file(entry.tb_frame.f_code.co_filename)
    ]
    shortened: types.TracebackType | None = None
    for entry in reversed(of_user):
        shortened = types.TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shortened or trace


def _entries(trace: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
