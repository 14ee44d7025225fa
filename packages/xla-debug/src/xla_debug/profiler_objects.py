"""``_XLAC.profiler``: the names with which torch_xla implements ``torch_xla.debug.profiler``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Final

from xla_core.extension_api.lowering import JaxObject
from xla_core.extension_api.profiler import (
    profiler_export,
    profiler_server,
    profiler_session,
)
from xla_debug import profiler
from xla_debug.profiler import TraceMe as TraceMe
from xla_debug.stacks import stack_frames

MSG_EXPORT: Final = "the session has ended; a session gives one profile only"


class ProfilerServer:
    """A server through which other processes record this one; it stops with the last reference to it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._server = profiler_server(port)


def start_server(port: int) -> ProfilerServer:
    """Start a server through which TensorBoard and ``trace`` record this process, at ``port``.

    It stops when the returned object is released.
    """
    return ProfilerServer(port)


def trace(
    service_addr: str,
    logdir: str,
    duration_ms: int = 1000,
    num_tracing_attempts: int = 3,
    timeout_s: int = 120,
    interval_s: int = 5,
    options: Mapping[str, int | str] | None = None,
) -> None:
    """Record a profile of the process whose server is at ``service_addr``, and write it to ``logdir``.

    ``options`` may have ``host_tracer_level``, ``device_tracer_level`` and ``delay_ms``. They and the other
    parameters are those of ``torch_xla.debug.profiler.trace``.
    """
    chosen = {
        name: int(value)
        for name, value in (options or {}).items()
        if name in ("host_tracer_level", "device_tracer_level", "delay_ms")
    }
    profiler.trace(
        service_addr,
        logdir,
        duration_ms,
        num_tracing_attempts,
        timeout_s=timeout_s,
        interval_s=interval_s,
        **chosen,
    )


class ScopePusher:
    """Makes ``name`` the outermost scope of operations that are recorded until ``close``.

    Releasing the object closes it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._open = True
        stack_frames.push_scope(name)

    def close(self) -> None:
        """End the scope."""
        if self._open:
            self._open = False
            stack_frames.pop_scope()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()


@contextlib.contextmanager
def scope_pusher(name: str) -> Iterator[None]:
    """A context manager: ``name`` is the outermost scope of operations that are recorded in the block."""
    pushed = ScopePusher(name)
    try:
        yield
    finally:
        pushed.close()


class TslProfilerSessionWrapper:
    """The recording of a profile. It begins at once; ``export(folder)`` or ``stop()`` ends it."""

    def __init__(self) -> None:
        self._session: object = profiler_session()

    def stop(self) -> bytes:
        """End the recording, and return the profile as a serialized XSpace. Raises RuntimeError if it has ended."""
        content: bytes = self._ended().stop()
        return content

    def export(self, tensorboard_dir: str) -> None:
        """End the recording, and write the profile below ``tensorboard_dir`` for TensorBoard's plugin.

        Raises RuntimeError if it has ended.
        """
        profiler_export(self._ended(), tensorboard_dir)

    def _ended(self) -> JaxObject:
        session, self._session = self._session, None
        if session is None:
            raise RuntimeError(MSG_EXPORT)
        return session


__all__ = [
    "ProfilerServer", "ScopePusher", "TraceMe", "TslProfilerSessionWrapper", "scope_pusher",
    "start_server", "trace",
]  # fmt: skip
