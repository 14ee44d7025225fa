"""A small separate process that writes the report if no process of the job can.

When the job's coordinator is lost, jaxlib aborts every process immediately, and no Python code runs any more. But
what each process had published last is in its files (``flight_files.keep``). The first process of each host starts
a witness, which waits for the end of that process at a pipe. If the job has then neither ended successfully nor
left a report, the witness makes one from these files. It imports neither torch nor jax, sleeps meanwhile, and ends
by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Final

from xla_core.support import flags, flight_files

END: Final = flight_files.END
_TICK_SECONDS: Final = 0.1
_CONNECT_SECONDS: Final = 1.0
_MORE_SECONDS: Final = 2.0
"""Other processes notice within XLA_DIST_FAILURE_TIMEOUT that one is gone, and then need a moment to write."""

MSG_LOST: Final = (
    "the job's coordinator at {address} is gone: it was killed, or its host is. The runtime has aborted {who}; "
    "this is what each had shown last"
)
MSG_WORDLESS: Final = (
    "{who} ended without a word: killed, aborted by the runtime, or out of memory (the job's coordinator at "
    "{address} listens). This is what each had shown last"
)
MSG_REPORT: Final = "xla-dist: {reason}\nflight report: {path}"


class Witness:
    """This process's witness; ``address`` is the coordinator's. Keep the object alive until the process ends.

    If no process can be started, there is no witness, and no error is raised.
    """

    def __init__(self, address: str) -> None:
        self._name = ""
        # not the job's variables: a search for the job's processes must not find the witness
        environment = {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            flags.FLIGHT_DIR.name: str(flight_files.folder().absolute()),
            flags.FAILURE_TIMEOUT.name: str(flags.FAILURE_TIMEOUT.get()),
        }
        self._pipe: IO[str] | None = None
        with contextlib.suppress(OSError):
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, address],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
                start_new_session=True,  # signals to the terminal's process group must not reach it
            )  # fmt: skip
            process.returncode = 0  # it outlives this process, which never waits for it
            self._pipe = process.stdin

    def name_job(self, name: str) -> None:
        """Tell the witness the job's name; repeated calls have no effect."""
        if name == self._name or self._pipe is None:
            return
        self._name = name
        with contextlib.suppress(OSError):  # the witness has been killed
            self._pipe.write(name + "\n")
            self._pipe.flush()


def main(address: str) -> None:
    """The witness's main function: wait for the end of its parent, and write the report if it is missing."""
    name = sys.stdin.readline().strip()
    sys.stdin.read()
    if not name:
        return
    place = flight_files.folder() / name
    until = time.monotonic() + flags.FAILURE_TIMEOUT.get() + _MORE_SECONDS
    while time.monotonic() < until and any(map(_may_run, _shown(place))):
        if _is_over(place):
            return
        time.sleep(_TICK_SECONDS)
    shown = _shown(place)
    if not shown or _is_over(place):
        return
    reason = _reason(address, shown)
    path = flight_files.conclude(name, END, reason)
    if path is not None:
        print(MSG_REPORT.format(reason=reason, path=path), file=sys.stderr, flush=True)  # noqa: T201


def _is_over(place: Path) -> bool:
    return (place / END / flight_files.MERGED).exists()


def _shown(place: Path) -> list[dict[str, object]]:
    """The states that processes have published which neither ended successfully nor reported."""
    shown = []
    for path in sorted((place / flight_files.RUNNING).glob("[0-9]*.json")):
        with contextlib.suppress(OSError):  # its process has just ended successfully
            shown.append(json.loads(path.read_text()))
    return shown


def _may_run(one: dict[str, object]) -> bool:
    """Whether a process may still write a report; always True for other hosts, where this is unknown."""
    if one["host"] != socket.gethostname():
        return True
    try:
        state = Path(f"/proc/{one['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def _reason(address: str, shown: list[dict[str, object]]) -> str:
    ordinals = ", ".join(str(one["ordinal"]) for one in shown)
    who = f"ordinal {ordinals}"
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return MSG_LOST.format(address=address, who=who)
    return MSG_WORDLESS.format(address=address, who=who)


if __name__ == "__main__":
    main(sys.argv[1])
