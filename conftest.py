"""What the tests of all packages share."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from xla_core.support import forked_programs


@pytest.hookimpl(trylast=True)  # after what is deselected has gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the workers of a run begin with the tests marked ``long``.

    When the others have ended, one that comes last would keep a processor busy, and leave the rest idle.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.get_closest_marker("long")]
    others = [item for item in items if not item.get_closest_marker("long")]
    ordered: list[pytest.Item] = []
    for number in range(workers):
        # as pytest-xdist hands them out: the same number to each worker, in this order
        count = (len(items) - len(ordered)) // (workers - number)
        own = long[number::workers][:count]
        ordered += own + others[: count - len(own)]
        del others[: count - len(own)]
    items[:] = ordered


def pytest_collection_finish() -> None:
    """Leave what imports and collection made to the end out of later garbage collections."""
    _leave_out_what_lives()


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> Iterator[None]:
    """Leave what the tests of a file left to the end (caches, mostly) out of later garbage collections.

    Tests that look at reference cycles or at lifetimes collect garbage themselves, and so do those that count
    programs: walking over torch, jax, the collected tests and the caches was a fifth of the time of all tests.
    """
    yield
    _leave_out_what_lives()


@pytest.fixture
def all_objects() -> None:
    """For tests that count living objects: those of earlier tests are among ``gc.get_objects()``, too."""
    gc.unfreeze()


def _leave_out_what_lives() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Each test draws the same numbers, whatever ran before it: the order differs from run to run."""
    random.seed(0)
    if "torch" in sys.modules:
        # torch.manual_seed formats the caller's stack for each kind of device that has not been initialized
        sys.modules["torch"].default_generator.manual_seed(0)
    if "xla_core.recording.random_state" in sys.modules:
        sys.modules["xla_core.recording.random_state"].seed_all(0)


@pytest.fixture(scope="session")
def folder_of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the workers of a run share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def program_servers(folder_of_run: Path) -> Iterator[Iterator[forked_programs.Server]]:
    """Processes that have imported torch and jax, in turns: programs are forked from them.

    The workers of a run share them.
    """
    with forked_programs.servers(folder_of_run) as in_turns:
        yield in_turns


_FILE = """
import runpy, sys
sys.argv[:] = {command}
sys.path[0] = {folder!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def run_program(
    tmp_path: Path, program_servers: Iterator[forked_programs.Server]
) -> Callable[..., str]:
    """Run a program in ``tmp_path``, on the CPU and without settings of this project; what it printed.

    Its process has torch and jax already. Keywords are environment variables.
    """

    def run(code: str, **environment: str) -> str:
        cleared = ("XLA_", "CPU_NUM_DEVICES", "PJRT_")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(cleared)}
        wanted = {**inherited, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1", **environment}
        done = next(program_servers).run(
            textwrap.dedent(code), cwd=str(tmp_path), environment=wanted, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def run_file(
    program_servers: Iterator[forked_programs.Server],
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script with arguments, as ``python FILE`` would; the finished process.

    Its process has torch and jax already. Keywords are environment variables, beside those that there are.
    """

    def run(path: Path, *arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [str(path), *map(str, arguments)]
        return next(program_servers).run(
            _FILE.format(command=command, folder=str(path.parent)),
            cwd=str(Path.cwd()), environment={**os.environ, **environment}, timeout=300,
        )  # fmt: skip

    return run


@pytest.fixture
def run_tool(run_file: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a script of ``tools/`` with arguments, without settings of this project; what it printed."""

    def run(name: str, *arguments: Any) -> str:
        with monkeypatch.context() as patch:
            for variable in [v for v in os.environ if v.startswith("XLA_")]:
                patch.delenv(variable)
            done = run_file(Path(__file__).parent / "tools" / name, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
