"""Tests of lowering rules written as generators of calls, compiled as one program each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from xla_core.testing.rules import Call, check_all


def together(test: Callable[..., Iterator[Call]]) -> Callable[..., None]:
    """A test that checks every ``Call`` the decorated generator yields, all in one program.

    Raises what ``check_all`` raises, and AssertionError when the generator yields nothing.
    """

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        calls = list(test(*args, **kwargs))
        assert calls, f"{test.__name__} yields no call to check"
        check_all(calls)

    return run
