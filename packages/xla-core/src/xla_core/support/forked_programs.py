"""Runs Python programs in processes that are forked from one which has imported torch and jax.

Both imports take seconds of processor time in every process, which is more than many programs take; so does what
torch imports for its first optimizer or the first compiled function.
Nothing of this project is imported before the fork: a program attaches the device and reads its environment
variables as a new interpreter would. What looks at imports themselves, or sets variables that torch, jax or
Python read when they start, needs a new interpreter.

The module is also the server's program: it is run by its path, so that it can be imported without xla_core.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import importlib.metadata
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypedDict

__all__ = [
    "PRELOADED",
    "READ_EARLY",
    "Server",
    "SharedServer",
    "servers",
]

PRELOADED = (
    "numpy", "torch", "jax", "jax.numpy", "jax.scipy.special", "jaxlib.mlir.dialects.builtin",
    "jaxlib.mlir.dialects.stablehlo", "jaxlib.mlir.dialects.mhlo", "torch.optim", "torch._dynamo",
    "torch._dynamo.backends.torchxla", "torch.fx.experimental.symbolic_shapes", "functorch.compile",
    "torch.distributed.tensor", "torch.export", "cProfile", "pluggy",
)  # fmt: skip
"""What a server imports before it forks, unless it is told otherwise."""

READ_EARLY = ("PYTHON", "TORCH_", "JAX_", "LD_")
"""How the variables begin that Python, torch and jax read when they start."""

MSG_READ_EARLY: Final = "{names}: read before the fork; run this program in a new interpreter"

MSG_TOOK_TOO_LONG: Final = "it was at:\n{error}"

MSG_SERVER_ENDED: Final = (
    "the process that starts programs ended with status {status}: killed, or out of memory; "
    "what it wrote is above"
)

_MAX_REQUEST = 1 << 20
_LAST_WORDS = 1.0
"""Seconds in which a program that took too long writes where its threads are."""


class Server:
    """A process that forks others. ``hash_seed`` is their PYTHONHASHSEED: it is fixed before the fork.

    It imports the modules ``preloaded`` first. Other keywords are environment variables that these imports find
    changed.
    """

    def __init__(
        self, hash_seed: int, *, preloaded: Sequence[str] = PRELOADED, **environment: str
    ) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _started([theirs], hash_seed, preloaded, environment)

    def run(
        self, code: str, *, cwd: str, environment: Mapping[str, str], timeout: float | None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``code`` as ``python -c`` would, with exactly this environment; what it printed and its status.

        A program that a signal ended has the negative number of the signal as its status. Raises
        subprocess.TimeoutExpired, after killing the program, if it takes more than ``timeout`` seconds (None: there
        is no limit): with what it wrote and, in its last lines, where its threads were. Other exceptions, such as
        Ctrl-C's, kill it as well. Raises ValueError for a variable that only a new interpreter would obey, and
        ChildProcessError if the server has ended.
        """
        early = (k for k in environment if k.startswith(READ_EARLY))
        if late := {k for k in early if environment[k] != os.environ.get(k)}:
            raise ValueError(MSG_READ_EARLY.format(names=", ".join(sorted(late))))
        request = json.dumps({"code": code, "cwd": cwd, "environment": dict(environment)}).encode()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            try:
                socket.send_fds(self._connection, [request], [out.fileno(), err.fileno()])
            except (BrokenPipeError, ConnectionResetError):
                raise self._ended() from None
            status = self._status(timeout)
            for file in (out, err):
                file.seek(0)
            output, error = (file.read().decode(errors="replace") for file in (out, err))
        command = ["python", "-c", code]
        if status is None:
            assert timeout is not None
            expired = subprocess.TimeoutExpired(command, timeout, output, error)
            expired.add_note(MSG_TOOK_TOO_LONG.format(error=error))
            raise expired
        return subprocess.CompletedProcess(command, status, output, error)

    def _status(self, timeout: float | None) -> int | None:
        """How the program ended; None, and it is killed, if it has not ended after ``timeout`` seconds."""
        pid = self._number()
        try:
            status = self._wait(timeout)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                self._wait(None)
            raise
        if status is None:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.kill(pid, signal.SIGQUIT)
            if self._wait(_LAST_WORDS) is None:
                os.kill(pid, signal.SIGKILL)
                self._wait(None)
        return status

    def _wait(self, seconds: float | None) -> int | None:
        self._connection.settimeout(seconds)
        try:
            return self._number()
        except TimeoutError:
            return None
        finally:
            self._connection.settimeout(None)

    def _number(self) -> int:
        """The next answer."""
        try:
            answer = self._connection.recv(64)
        except ConnectionResetError:
            answer = b""
        if not answer:
            raise self._ended()
        return int(answer)

    def _ended(self) -> ChildProcessError:
        return ChildProcessError(MSG_SERVER_ENDED.format(status=self._process.wait()))

    def close(self) -> None:
        """End the server."""
        self._connection.close()
        self._process.wait()


class SharedServer(Server):
    """A server that processes share which name the same ``folder`` and hash seed; it is for them alone.

    The first of them starts it, and for each of them it forks a process that answers its requests. When the first
    closes it, the others can go on, and who comes later starts another one.
    """

    def __init__(
        self,
        folder: Path,
        hash_seed: int,
        *,
        preloaded: Sequence[str] = PRELOADED,
        **environment: str,
    ) -> None:
        self._own: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        path = folder / f"programs-{hash_seed}"
        while True:
            with (folder / "programs.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                connection = _connected(path)
                if connection is None:
                    connection = self._start(path, hash_seed, preloaded, environment)
            with contextlib.suppress(ConnectionResetError):
                if connection.recv(1):
                    break
            # the server has ended before it came to this connection
            connection.close()
            if self._own:
                self._end_own()
                raise self._ended()
        self._connection = connection

    def _start(
        self, path: Path, hash_seed: int, preloaded: Sequence[str], environment: Mapping[str, str]
    ) -> socket.socket:
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(path))
        listener.listen()
        life, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with listener, theirs:
            self._own = _started([theirs, listener], hash_seed, preloaded, environment), life
            connection = _connected(path)
        assert connection is not None
        return connection

    def _ended(self) -> ChildProcessError:
        # what answers this process is no child of it
        status = self._own[0].poll() if self._own else None
        return ChildProcessError(
            MSG_SERVER_ENDED.format(status="unknown" if status is None else status)
        )

    def _end_own(self) -> None:
        if self._own:
            process, life = self._own
            life.close()
            process.wait()

    def close(self) -> None:
        """Leave the server; end it, if this process has started it."""
        self._connection.close()
        self._end_own()


def _started(
    sockets: Sequence[socket.socket],
    hash_seed: int,
    preloaded: Sequence[str],
    environment: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """A new server, which is given ``sockets``: a connection, or one that ends it and one that it listens at."""
    descriptors = [one.fileno() for one in sockets]
    return subprocess.Popen(
        [sys.executable, __file__, " ".join(preloaded), *map(str, descriptors)],
        pass_fds=descriptors,
        env={
            **os.environ,
            "PYTHONHASHSEED": str(hash_seed),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            **environment,
        },
        start_new_session=True,
    )


def _connected(path: Path) -> socket.socket | None:
    """A connection to the server that listens at ``path``; None if none does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[Iterator[Server]]:
    """Servers used alternately, each with its own hash seed; processes that name the same folder share them.

    Programs that follow each other and must agree (on a cache's key, for instance) differ in the order of
    their sets, as those of new interpreters do. A server is started when its turn comes for the first time.
    """
    started: list[Server] = []

    def in_turns() -> Iterator[Server]:
        for seed in (1, 2):
            started.append(SharedServer(folder, seed, OMP_NUM_THREADS="1"))
            yield started[-1]
        while True:
            yield from started

    try:
        yield in_turns()
    finally:
        for server in started:
            server.close()


def _accepted(life: socket.socket, listener: socket.socket) -> socket.socket | None:
    """In a forked process, a connection; None when the process that started this one closes it, or ends."""
    while True:
        ready, _, _ = select.select([life, listener], [], [])
        if life in ready:
            return None
        connection, _ = listener.accept()
        if os.fork() == 0:
            life.close()
            listener.close()
            connection.send(b"1")
            return connection
        connection.close()


def _serve(connection: socket.socket) -> str | None:
    """Answer requests until the other side closes the connection; in a forked process, return its code."""
    while True:
        data, (out, err), _, _ = _receive(connection)
        if not data:
            return None
        request = json.loads(data)
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become(request, out, err)
            return str(request["code"])
        os.close(out)
        os.close(err)
        connection.send(str(pid).encode())
        _end_with(connection, pid)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _end_with(connection: socket.socket, pid: int) -> None:
    """Return when the program has ended; it is killed if the process that wants it ends before."""
    program = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([program, connection.fileno()], [], [])
        if program not in ready:  # nothing is sent meanwhile: the connection has been closed
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(program)


def _receive(connection: socket.socket) -> tuple[bytes, list[int], int, object]:
    data, descriptors, flags, address = socket.recv_fds(connection, _MAX_REQUEST, 2)
    return data, descriptors or [-1, -1], flags, address


class _Request(TypedDict):
    code: str
    cwd: str
    environment: dict[str, str]


def _become(request: _Request, out: int, err: int) -> None:
    """Take over the request's output files, folder and environment."""
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, 256)
    # the program goes on after it: ended by the signal, it could write a core file of gigabytes
    faulthandler.register(signal.SIGQUIT)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = ["-c"]
    sys.path.insert(0, "")


def _autoload() -> None:
    """What ``import torch`` does at its end (torch 2.11 to 2.15) unless the environment says otherwise."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        for entry in importlib.metadata.entry_points(group="torch.backends"):
            entry.load()()


def _main() -> None:
    del sys.path[
        0
    ]  # the folder of this file: its modules must not be found as ``flags`` or ``messages``
    preloaded, *descriptors = sys.argv[1:]
    for name in preloaded.split():
        importlib.import_module(name)
    # Neither the collections of a forked program nor the last one, at its end, walk over all of torch and jax:
    # that took half a second, and a copy of every page that they lie in.
    gc.collect()
    gc.freeze()
    first, *listener = (socket.socket(fileno=int(number)) for number in descriptors)
    connection = _accepted(first, *listener) if listener else first
    code = _serve(connection) if connection else None
    if code is not None:
        _autoload()
        program = types.ModuleType("__main__")
        sys.modules["__main__"] = program
        exec(compile(code, "<string>", "exec"), program.__dict__)  # noqa: S102 - a test's own program


if __name__ == "__main__":
    _this = sys.modules["__main__"]  # lives on when the program takes its place
    _main()
