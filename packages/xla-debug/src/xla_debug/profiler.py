"""``torch_xla.debug.profiler`` (xp): profiles that TensorBoard's profile plugin and Perfetto open.

The recording is jaxlib's, without starting any of jax's own backends. Operations carry the user's
module scopes: in the HLO of the profile, and in the trace that Perfetto reads as ``scope`` of each
device event and as rows of modules and operators (``perfetto``).
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from xla_core.extension_api import profiler, runtime, training
from xla_debug import perfetto, remote_profile
from xla_debug.stacks import stack_frames

MSG_RUNNING: Final = "a profile is being recorded already; stop_trace() ends it"
MSG_NOT_RUNNING: Final = "no profile is being recorded; start_trace(log_dir) begins one"


class _State:
    lock = threading.Lock()
    session: object = None
    folder: Path | None = None
    server: object = None
    port: int | None = None
    marked_step = True


# -- the user's own spans -------------------------------------------------------------------------


class TraceMe:
    """A named span in profiles, between ``__enter__`` and ``__exit__``; ``kwargs`` are shown with it."""

    def __init__(self, name: str, **kwargs: object) -> None:
        self.name = name
        self._details = kwargs
        self._span: Any = None

    def __enter__(self) -> Self:
        self._span = profiler.trace_me(self.name, **self._details)
        self._span.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._span.__exit__(kind, error, traceback)


class Trace(TraceMe):
    """A named span in profiles; operations recorded inside carry ``name`` as their outermost scope.

    ``kwargs`` are shown with the span.
    """

    def __enter__(self) -> Self:
        super().__enter__()
        stack_frames.push_scope(self.name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stack_frames.pop_scope()
        super().__exit__(kind, error, traceback)


class StepTrace(Trace):
    """A span around one step, which it ends: leaving the block calls ``torch_xla.sync()``.

    ``step_num=N`` lets TensorBoard group events by step. Within the block only.
    """

    def __init__(self, name: str, **kwargs: object) -> None:
        super().__init__(name, **kwargs, _r=1)  # the mark of a step in profiles

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None and runtime.started():
                training.sync()
        finally:
            super().__exit__(kind, error, traceback)


def trace_me(scope: str) -> object:
    """A decorator, or a ``with`` block: what runs inside is a span ``scope`` in profiles."""
    return _Span(scope)


class _Span(contextlib.ContextDecorator):
    def __init__(self, name: str) -> None:
        self.name = name
        self._open: list[Trace] = []

    def __enter__(self) -> _Span:
        self._open.append(Trace(self.name).__enter__())
        return self

    def __exit__(self, *details: Any) -> None:
        self._open.pop().__exit__(*details)


def set_tracer_marked_step(value: bool) -> None:
    """Say whether leaving a ``StepTrace`` has ended the step, for loaders that would end it too."""
    _State.marked_step = value


def get_tracer_marked_step() -> bool:
    """What ``set_tracer_marked_step`` was given last."""
    return _State.marked_step


# -- recording ------------------------------------------------------------------------------------


def start_trace(log_dir: str) -> None:
    """Begin to record; ``stop_trace`` writes below ``log_dir``. Raises RuntimeError if one is running."""
    with _State.lock:
        if _State.session is not None:
            raise RuntimeError(MSG_RUNNING)
        runtime.client()  # its threads must be there to be seen
        _State.session = profiler.profiler_session()
        _State.folder = Path(log_dir)


def stop_trace() -> None:
    """Write the profile to ``LOG_DIR/plugins/profile/TIME/``: an xplane file and one for Perfetto.

    Raises RuntimeError if none is recorded.
    """
    with _State.lock:
        session, folder = _State.session, _State.folder
        if session is None or folder is None:
            raise RuntimeError(MSG_NOT_RUNNING)
        _State.session = _State.folder = None
        _export(session, folder)


def _export(session: object, folder: Path) -> None:
    began = time.time() - 2  # file systems with whole seconds
    profiler.profiler_export(session, str(folder))
    for path in (folder / "plugins" / "profile").glob("*/*.trace.json.gz"):
        if path.stat().st_mtime >= began:
            perfetto.add_scopes(path)


# -- servers --------------------------------------------------------------------------------------


def start_server(port: int, only_on_master: bool = True) -> object | None:
    """Let TensorBoard and ``trace`` record this process through ``port``; returns the server.

    With several processes and ``only_on_master`` only the first has one; the others get None. A process has
    one server: where it has one already, that goes on for the same port, and ends for another one.
    """
    if only_on_master and runtime.started() and not runtime.is_master_ordinal(local=True):
        return None
    with _State.lock:
        if _State.server is not None and _State.port == port:
            return _State.server
        _State.server = None  # it ends with its last reference
        _State.server = profiler.profiler_server(port)
        _State.port = port
        return _State.server


def stop_server() -> None:
    """End the server of ``start_server``, if there is one."""
    with _State.lock:
        _State.server = _State.port = None


def trace(
    service_addr: str,
    logdir: str,
    duration_ms: int = 1000,
    num_tracing_attempts: int = 3,
    host_tracer_level: int = 2,
    device_tracer_level: int = 1,
    delay_ms: int = 0,
    timeout_s: int = 120,
    interval_s: int = 5,
) -> None:
    """Record the process that serves at ``service_addr`` (``host:port``) and write below ``logdir``.

    Blocks for ``delay_ms`` + ``duration_ms``. This process's own server is recorded without the network;
    another's needs grpcio (``pip install xla-debug[remote]``). Raises RuntimeError when that fails
    ``num_tracing_attempts`` times, ``interval_s`` seconds apart, ValueError for an address without port.
    """
    host, separator, port = service_addr.rpartition(":")
    if not separator or not port.isdecimal():
        raise ValueError(f"service_addr is {service_addr!r}; give host:port")
    del device_tracer_level  # devices record all or nothing
    time.sleep(delay_ms / 1000)
    if _State.port == int(port) and host in ("localhost", "127.0.0.1", "[::1]"):
        start_trace(logdir)
        time.sleep(duration_ms / 1000)
        stop_trace()
        return
    remote_profile.record(
        service_addr,
        logdir,
        duration_ms,
        attempts=num_tracing_attempts,
        host_level=host_tracer_level,
        timeout=timeout_s,
        interval=interval_s,
    )


def trace_detached(*args: object, **kwargs: object) -> threading.Thread:
    """``trace`` in a thread of its own, which is returned: the script goes on meanwhile.

    A process does not end before what was recorded is written.
    """
    thread = threading.Thread(target=trace, args=args, kwargs=kwargs, name="xla-profile")
    thread.start()
    return thread
