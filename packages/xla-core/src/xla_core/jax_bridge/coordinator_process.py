"""The coordination service of a job, in this process or in one of its own.

The service has to outlive process 0: were it a part of that process, then jaxlib would abort all
others the moment process 0 is killed, before anybody could say what happened. So process 0 starts it
with ``python -m xla_core.jax_bridge.coordinator_process``, and it stays for as long as others are connected. That
process imports nothing but jaxlib, to start fast.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

# jaxlib 0.10.2: the extension module with the distributed runtime, and the level of what C++ prints
from jaxlib import _jax as _jaxlib
from jaxlib import utils as _jaxlib_utils

_LOG_LEVEL: Final = "TF_CPP_MIN_LOG_LEVEL"
_WARNINGS: Final = "1"
"""What ``import jax`` sets."""
_ERRORS: Final = "2"
_READY: Final = "listening"
_TICK_SECONDS: Final = 0.25
_LINGER_SECONDS: Final = 30.0
"""The others need the time in which they find out that process 0 is gone."""
_TABLES: Final = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_ESTABLISHED: Final = "01"

MSG_NOT_STARTED: Final = "the job's coordinator cannot listen at {address}: {error}"


def start_coordinator(address: str, processes: int, dead_after: int, start_within: int) -> Any:
    """Run the service at ``address`` (``host:port``) through which ``processes`` processes meet.

    A process silent for ``dead_after`` seconds is dead; the service does not end the others. It ends
    with ``shutdown()`` of the result.
    """
    # jaxlib 0.10.2: recoverable leaves it to our own watchdog what the death of one process means
    return _jaxlib.get_distributed_runtime_service(
        address,
        processes,
        heartbeat_timeout=dead_after,
        cluster_register_timeout=start_within,
        shutdown_timeout=start_within,
        recoverable=True,
    )


class CoordinatorHere:
    """The service in this process, without the warning that jaxlib prints for every job of this kind.

    While it runs, jaxlib's C++ code prints errors only, unless the user asks for more than jax's default
    (``TF_CPP_MIN_LOG_LEVEL=0``).
    """

    def __init__(self, address: str, processes: int, dead_after: int, start_within: int) -> None:
        self._quiet = os.environ.get(_LOG_LEVEL, _WARNINGS) == _WARNINGS
        if self._quiet:
            _jaxlib_utils.absl_set_min_log_level(int(_ERRORS))
        self._service = start_coordinator(address, processes, dead_after, start_within)

    def shutdown(self) -> None:
        """End the service."""
        self._service.shutdown()
        if self._quiet:
            _jaxlib_utils.absl_set_min_log_level(int(_WARNINGS))


class CoordinatorProcess:
    """The service in a process of its own, which survives this one while others are connected."""

    def __init__(self, address: str, processes: int, dead_after: int, start_within: int) -> None:
        numbers = map(str, (processes, dead_after, start_within, os.getpid()))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            _LOG_LEVEL: os.environ.get(_LOG_LEVEL, _ERRORS),
        }
        pipe = subprocess.PIPE
        # not a member of the terminal's or a launcher's group of processes: both may be killed at once
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, address, *numbers],
            env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._await(address)

    def _await(self, address: str) -> None:
        """Return once it listens. Raises RuntimeError with its last words otherwise."""
        output, errors = self._process.stdout, self._process.stderr
        assert output is not None
        assert errors is not None
        with output, errors:
            if output.readline().strip() == _READY:
                return
            words = errors.read().strip().splitlines() or ["it ended without a word"]
        self._process.wait()
        raise RuntimeError(MSG_NOT_STARTED.format(address=address, error=words[-1]))

    def leave(self) -> None:
        """Leave the service to the others: it ends with the last connection."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as pipe:  # it may have been killed
            pipe.write("\n")
        self._process.returncode = 0  # this process never waits for it

    def shutdown(self) -> None:
        """End the service, which the job does not need any more, and wait for its process to end."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self._process.terminate()
        self._process.wait()


def _connected(port: int) -> bool:
    """Whether any process is connected to ``port`` of this host; True where the system does not say."""
    ending = f":{port:04X}"
    tables = [table for table in _TABLES if table.exists()]
    lines = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    established = any(line[1].endswith(ending) and line[3] == _ESTABLISHED for line in lines)
    return established or not tables


def serve_apart(argv: Sequence[str]) -> None:
    """The process's main function: serve until the parent has left or ended and no client is connected."""
    address = argv[0]
    processes, dead_after, start_within, parent = map(int, argv[1:])
    service = start_coordinator(address, processes, dead_after, start_within)
    print(_READY, flush=True)  # noqa: T201 - the parent waits for it
    while os.getppid() == parent:
        if select.select([sys.stdin], [], [], _TICK_SECONDS)[0]:
            if sys.stdin.readline():
                break
            time.sleep(_TICK_SECONDS)  # closed
    until = time.monotonic() + _LINGER_SECONDS
    while time.monotonic() < until and _connected(int(address.rpartition(":")[2])):
        time.sleep(_TICK_SECONDS)
    service.shutdown()


if __name__ == "__main__":
    serve_apart(sys.argv[1:])
