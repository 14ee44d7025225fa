"""``torch_xla.debug.profiler`` (xp): profiles that TensorBoard's profile plugin and Perfetto open.

jaxlib's profiler records them, without starting any of jax's own backends. The user's module scopes are in the HLO
of a profile, and in the file for Perfetto: as ``scope`` of each device event, and as rows of modules and operators
(``perfetto``).
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from xla_core.extension_api import profiler, runtime, training
from xla_core.extension_api.lowering import JaxObject
from xla_debug import perfetto, remote_profile
from xla_debug.stacks import stack_frames

MSG_RUNNING: Final = "a profile is being recorded already; call stop_trace() first"
MSG_NOT_RUNNING: Final = "no profile is being recorded; call start_trace(log_dir) first"


class _State:
    lock = threading.Lock()
    session: object = None
    folder: Path | None = None
    server: object = None
    port: int | None = None
    marked_step = True


# -- the user's own spans -------------------------------------------------------------------------


class TraceMe:
    """A context manager whose block is a span called ``name`` in profiles, which show ``kwargs`` with it."""

    def __init__(self, name: str, **kwargs: object) -> None:
        self.name = name
        self._details = kwargs
        self._span: JaxObject = None

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
    """A ``TraceMe`` whose ``name`` is also the outermost scope of the operations that are recorded in the block."""

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
    """A ``Trace`` around one step. Leaving the block without an error ends the step, by ``torch_xla.sync()``.

    TensorBoard groups events by step if ``step_num=N`` is passed.
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
    """A decorator or context manager: the function or block is a ``Trace`` called ``scope``."""
    return _Span(scope)


class _Span(contextlib.ContextDecorator):
    def __init__(self, name: str) -> None:
        self.name = name
        self._open: list[Trace] = []

    def __enter__(self) -> _Span:
        self._open.append(Trace(self.name).__enter__())
        return self

    def __exit__(
        self,
        *details: *tuple[type[BaseException] | None, BaseException | None, TracebackType | None],
    ) -> None:
        self._open.pop().__exit__(*details)


def set_tracer_marked_step(value: bool) -> None:
    """Store whether leaving a ``StepTrace`` has ended the step, for loaders that would end it too."""
    _State.marked_step = value


def get_tracer_marked_step() -> bool:
    """The last value passed to ``set_tracer_marked_step``; True by default."""
    return _State.marked_step


# -- recording ------------------------------------------------------------------------------------


def start_trace(log_dir: str) -> None:
    """Start recording a profile, which ``stop_trace`` writes below ``log_dir``.

    Raises RuntimeError if a profile is being recorded already.
    """
    with _State.lock:
        if _State.session is not None:
            raise RuntimeError(MSG_RUNNING)
        runtime.client()  # its threads must exist to be recorded
        _State.session = profiler.profiler_session()
        _State.folder = Path(log_dir)


def stop_trace() -> None:
    """Stop recording, and write the profile to ``LOG_DIR/plugins/profile/TIME/``: an xplane and a Perfetto file.

    Raises RuntimeError if no profile is being recorded.
    """
    with _State.lock:
        session, folder = _State.session, _State.folder
        if session is None or folder is None:
            raise RuntimeError(MSG_NOT_RUNNING)
        _State.session = _State.folder = None
        _export(session, folder)


def _export(session: object, folder: Path) -> None:
    before = _perfetto_files(folder)
    profiler.profiler_export(session, str(folder))
    for path, version in _perfetto_files(folder).items():
        # the file of an earlier profile has its scopes already
        if before.get(path) != version:
            perfetto.add_scopes(path)


def _perfetto_files(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """The files for Perfetto below ``folder``, each with numbers that change when it is written."""
    paths = (folder / "plugins" / "profile").glob("*/*.trace.json.gz")
    stats = [(path, path.stat()) for path in paths]
    return {path: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in stats}


# -- servers --------------------------------------------------------------------------------------


def start_server(port: int, only_on_master: bool = True) -> object | None:
    """Start a server through which TensorBoard and ``trace`` record this process, at ``port``, and return it.

    With ``only_on_master`` (default: True), only the first process of a host starts one, and the others return
    None. A process has one server: a second call returns it if the port is the same, and otherwise replaces it.
    """
    if only_on_master and runtime.started() and not runtime.is_master_ordinal(local=True):
        return None
    with _State.lock:
        if _State.server is not None and _State.port == port:
            return _State.server
        _State.server = _State.port = None  # the server ends with its last reference
        _State.server = profiler.profiler_server(port)
        _State.port = port
        return _State.server


def stop_server() -> None:
    """Stop the server of ``start_server``, if there is one."""
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
    """Record a profile of the process that serves at ``service_addr`` (``host:port``), and write it to ``logdir``.

    Waits ``delay_ms`` milliseconds (default: 0), and then records for ``duration_ms`` (default: 1000). If the
    server is this process's own, nothing is sent over the network. Otherwise it needs grpcio (``pip install
    xla-debug[remote]``), makes up to ``num_tracing_attempts`` attempts (default: 3) that are ``interval_s`` seconds
    apart (default: 5), and waits up to ``timeout_s`` seconds (default: 120) for each. ``host_tracer_level``
    (default: 2) is the level of detail on the host; ``device_tracer_level`` has no effect.

    Raises ValueError if ``service_addr`` has no port, ImportError without grpcio, and RuntimeError if all attempts
    fail.
    """
    host, separator, port = service_addr.rpartition(":")
    if not separator or not port.isdecimal():
        raise ValueError(f"service_addr is {service_addr!r}; give host:port")
    del device_tracer_level  # devices record everything or nothing
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
    """Run ``trace`` with these arguments in a new thread, and return the thread.

    The process does not end before the profile is written.
    """
    thread = threading.Thread(target=trace, args=args, kwargs=kwargs, name="xla-profile")
    thread.start()
    return thread
