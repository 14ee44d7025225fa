"""Programs that tests run in forked processes: what is known of one that does not end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from xla_core.support import forked_programs


def test_a_program_that_takes_too_long_says_where_it_was(program_servers, tmp_path, monkeypatch):
    code = "import time\nprint('begun', flush=True)\ndef waits():\n    time.sleep(1000)\nwaits()\n"
    monkeypatch.setenv(
        "TORCH_DEVICE_BACKEND_AUTOLOAD", "0"
    )  # as the server has it: it begins at once
    environment = dict(os.environ)
    server = next(program_servers)
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        server.run(code, cwd=str(tmp_path), environment=environment, timeout=3)
    assert caught.value.stdout == "begun\n"
    assert 'File "<string>", line 4 in waits' in caught.value.stderr
    assert "line 4 in waits" in caught.value.__notes__[0]
    again = server.run("print(1)", cwd=str(tmp_path), environment=environment, timeout=60)
    assert (again.returncode, again.stdout) == (0, "1\n")


def test_an_interrupt_ends_the_program_as_well(program_servers, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    begun = tmp_path / "begun"
    code = f"import os, time\nopen({str(begun)!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)\n"

    def interrupt(*_):
        if not (begun.exists() and begun.read_text()):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            return
        raise KeyboardInterrupt

    server, environment = next(program_servers), dict(os.environ)
    former = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            server.run(code, cwd=str(tmp_path), environment=environment, timeout=None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)
    again = server.run("print(1)", cwd=str(tmp_path), environment=environment, timeout=60)
    assert (again.returncode, again.stdout) == (0, "1\n")


def test_a_server_that_was_killed_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    server = forked_programs.Server(1, preloaded=())
    environment = dict(os.environ)
    code = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n"
    options = {"cwd": str(tmp_path), "environment": environment, "timeout": 60}
    for _ in range(2):  # while a program runs, and when there is no server
        with pytest.raises(ChildProcessError, match="ended with status -9: killed, or out of mem"):
            server.run(code, **options)
    server.close()


def test_processes_share_a_server_and_go_on_without_the_one_that_started_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

    def run(server, code):
        done = server.run(code, cwd=str(tmp_path), environment=dict(os.environ), timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def parents(server):
        """The process that forks the server's programs, and the one that forked it."""
        code = "import os; print(open(f'/proc/{os.getppid()}/stat').read())"
        stat = run(server, code)
        process, rest = stat.split()[0], stat.rpartition(")")[2].split()
        return int(process), int(rest[1])

    first, second = (forked_programs.SharedServer(tmp_path, 1, preloaded=()) for _ in range(2))
    other_seed = forked_programs.SharedServer(tmp_path, 2, preloaded=())
    (forks_first, started), (forks_second, same) = parents(first), parents(second)
    assert same == started != parents(other_seed)[1]
    assert forks_first != forks_second
    with pytest.raises(ChildProcessError, match="ended with status unknown"):
        run(first, "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n")
    third = forked_programs.SharedServer(tmp_path, 1, preloaded=())
    assert parents(third)[1] == started
    first.close()
    assert not is_running(started)
    assert parents(second) == (forks_second, parents(third)[1])
    fourth = forked_programs.SharedServer(tmp_path, 1, preloaded=())
    assert parents(fourth)[1] not in (started, parents(other_seed)[1])
    for server in (second, third, fourth, other_seed):
        server.close()


def test_a_shared_server_that_cannot_start_says_so(tmp_path):
    with pytest.raises(ChildProcessError, match="ended with status 1"):
        forked_programs.SharedServer(tmp_path, 1, preloaded=["no_such_module"])


def test_a_program_ends_with_the_process_that_wants_it(tmp_path, run_interpreter):
    begun = tmp_path / "begun"
    run_interpreter(
        f"""
        import os, pathlib, signal, threading, time
        from xla_core.support.forked_programs import Server
        begun = pathlib.Path({str(begun)!r})
        code = "import os, time; open({str(begun)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
        options = dict(cwd=".", environment=dict(os.environ), timeout=None)
        server = Server(1, preloaded=())
        threading.Thread(target=server.run, args=(code,), kwargs=options, daemon=True).start()
        while not (begun.exists() and begun.read_text()):
            time.sleep(0.05)
        os._exit(0)
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    program, until = int(begun.read_text()), time.monotonic() + 30
    while is_running(program):
        assert time.monotonic() < until, "the program goes on"
        time.sleep(0.05)


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
