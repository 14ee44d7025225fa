"""Shows that a change left every program as it was: records digests of programs, and compares recordings.

``python tools/replay.py record before.json train.py --epochs 1`` runs a script, and
``python tools/replay.py record before.json -m pytest packages/xla-core/tests/test_training.py`` a module,
in this process. For each step that it compiles the recording has a digest of the step as it was recorded
(all operations with their operands, shapes and dtypes) and one of each module that it was lowered to
(StableHLO without source locations). ``python tools/replay.py compare before.json after.json`` prints
what one of them has and the other has not, and exits with 1 if there is anything. Where a step is the same
and was lowered otherwise, it says which operators the programs have that differ and no other program has:
a rule that was changed is among them.

Programs that child processes compile are not seen. The order in which programs are compiled is part of a
recording, so run tests in one process and with hash-based choices fixed (``PYTHONHASHSEED=0``).
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xla_core.contract import events
from xla_core.extension_api import programs as core_programs
from xla_core.extension_api.steps import Operation

Recorded = list[dict[str, Any]]


def record(target: Sequence[str]) -> tuple[Recorded, int]:
    """The programs that ``target``, a script or ``-m`` and a module with arguments, compiles, and its exit code."""
    programs: Recorded = []

    def listen(compiled: events.ProgramCompiled) -> None:
        programs.append(
            {
                "step": compiled.digest,
                "operations": len(compiled.entries),
                "operators": sorted(
                    {e.plan.name for e in compiled.entries if isinstance(e, Operation)}
                ),
                "modules": [_digest(module.stablehlo) for module in compiled.modules],
                "during": os.environ.get("PYTEST_CURRENT_TEST", target[0]).split(" ")[0],
            }
        )

    unsubscribe = events.subscribe(events.ProgramCompiled, listen)
    code = 0
    try:
        _run(target)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        unsubscribe()
    return programs, code


def _digest(stablehlo: bytes) -> str:
    return hashlib.sha256(core_programs.module_text(stablehlo).encode()).hexdigest()[:32]


def _run(target: Sequence[str]) -> None:
    if target[0] == "-m":
        sys.argv = list(target[1:])
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(target[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(target)
        sys.path.insert(0, str(Path(target[0]).resolve().parent))
        runpy.run_path(target[0], run_name="__main__")


def differences(before: Recorded, after: Recorded) -> list[str]:
    """One line per program that only one recording has, or has elsewhere in the order."""
    old, new = (list(map(_line, recording)) for recording in (before, after))
    changed = difflib.unified_diff(old, new, "before", "after", n=0, lineterm="")
    return [line for line in changed if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def _line(program: dict[str, Any]) -> str:
    # not where it was compiled: that moves with the files of tests
    modules = " ".join(program["modules"])
    return f"step {program['step']} of {program['operations']} operations: {modules}"


def suspects(before: Recorded, after: Recorded) -> list[tuple[list[str], list[str]]]:
    """For each step that was lowered otherwise: operators that no equal program has, and all of its operators.

    A step that several tests record is looked at once.
    """
    former = {program["step"]: program["modules"] for program in before}
    known = {program["step"]: program for program in after if program["step"] in former}
    equal = [p for p in known.values() if p["modules"] == former[p["step"]]]
    innocent = {name for program in equal for name in program["operators"]}
    return [
        (sorted(set(program["operators"]) - innocent), program["operators"])
        for program in known.values()
        if program["modules"] != former[program["step"]]
    ]


def compare(before: Path, after: Path) -> int:
    """Print the differences of two recordings; 1 if there are any, 2 if one of them is empty."""
    recordings = [json.loads(path.read_text("utf-8")) for path in (before, after)]
    for path, recording in zip((before, after), recordings, strict=True):
        if not recording:
            print(f"{path} has no programs: nothing is compared")
            return 2
    found = differences(*recordings)
    for line in found:
        print(line)
    for rare, operators in suspects(*recordings):
        print("same step, other program:", ", ".join(rare) or f"one of {', '.join(operators)}")
    print(
        f"{len(recordings[0])} programs before, {len(recordings[1])} after, {len(found)} lines differ"
    )
    return int(bool(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser(
        "record", help="run a script or a module, and write what it compiles"
    )
    recording.add_argument("file", type=Path)
    recording.add_argument("target", nargs=argparse.REMAINDER, metavar="SCRIPT | -m MODULE ...")
    comparing = commands.add_parser("compare", help="compare two recordings")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "compare":
        return compare(given.before, given.after)
    if not given.target or given.target == ["-m"]:
        recording.error("say which script, or which module after -m, to run")
    programs, code = record(given.target)
    given.file.write_text(json.dumps(programs, indent=0), "utf-8")
    print(f"{len(programs)} programs recorded in {given.file}")
    return code


if __name__ == "__main__":
    sys.exit(main())
