"""How long a process waits for others that are not there; xla-dist's tests do it with real processes."""

from __future__ import annotations

import types

import pytest

from xla_core.multiprocess import startup_watchdog


class _Ended(Exception):
    """In the place of the end of the process."""


def test_by_default_a_process_that_is_not_there_is_given_8_seconds(monkeypatch, capsys):
    """From when it was first missed; anew if it has been there meanwhile."""

    def leave(status):
        raise _Ended(status)

    monkeypatch.setattr(startup_watchdog.os, "_exit", leave)
    missing: list[int] = []
    siblings = types.SimpleNamespace(variable="RANK", absent=lambda me: missing)
    watchdog = startup_watchdog.StartupWatchdog(0, 2, "127.0.0.1:1", 120, siblings)
    watchdog._look(100.0)
    missing.append(1)
    for now in (101.0, 108.9):
        watchdog._look(now)
    missing.clear()
    watchdog._look(109.0)
    missing.append(1)
    for now in (110.0, 117.9):
        watchdog._look(now)
    with pytest.raises(_Ended, match=str(startup_watchdog.EXIT_CODE)):
        watchdog._look(118.0)
    assert "no process with RANK=1 runs on this host" in (text := capsys.readouterr().err)
    assert "(8 s, XLA_DIST_ABSENT_TIMEOUT)" in text
