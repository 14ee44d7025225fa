"""Reports what ``XLA_VARYING_SHAPES=1`` serves, and whether exactly: random programs, and PyTorch's operators.

``python tools/varying_report.py programs 0 2000`` runs the random programs of these seeds with one or two varying
dimensions, padding of NaN, and prints the smallest part of each that differs from the CPU.

``python tools/varying_report.py operators report.json`` varies one size of the samples of the operators that
transformers, convolutional and recurrent nets use (``--all``: of all operators), forward and backward. It adds
to ``report.json`` what is not there yet, so that a run which was stopped goes on, and prints a summary: served
exactly, kept out and why, wrong, or not to be varied (the CPU takes no sample with another size).

Steps that no program for a bound serves are not run, only recorded: they are compared elsewhere. Exits with 1 if
anything is wrong.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Final

from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

from xla_core.support import caches
from xla_core.testing.lengths import operators, programs
from xla_core.testing.op_db import name_of
from xla_core.varying import families

# Several times faster to compile.
_XLA_FLAGS: Final = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
_MODES: Final = ("forward", "backward")


def run_programs(first: int, end: int) -> bool:
    """Run the programs of seeds from ``first`` to below ``end``; whether none differs."""
    served = wrong = unserved = 0
    reasons: collections.Counter[str] = collections.Counter()
    for seed in range(first, end):
        program = programs.make_program(seed)
        found = programs.outcome(program)
        served += found.served
        unserved += not found.served
        reasons.update(_without_place(reason) for reason in families.kept_out())
        caches.clear_all()
        if found.difference is not None:
            wrong += 1
            print(f"{programs.smaller(program)}\n{found.difference}", flush=True)
            caches.clear_all()
        if seed % 100 == 99:
            print(f"seed {seed}: {served} steps served, {wrong} programs wrong", flush=True)
    print(
        f"{end - first} programs, {unserved} of them never served, {served} steps served, {wrong} wrong"
    )
    _print_reasons(reasons)
    return not wrong


def run_operators(path: Path, every: bool, only: set[str]) -> bool:
    """Run operators that ``path`` does not have; whether none of all that it then has is wrong."""
    report: dict[str, object] = json.loads(path.read_text()) if path.exists() else {}
    for op in op_db:
        for mode in _MODES:
            key = f"{name_of(op)} {mode}"
            if key in report or not (
                _named(op, only) if only else every or op.name in operators.NETS
            ):
                continue
            if mode == "backward" and not op.supports_autograd:
                continue
            found = operators.verdict(op, mode == "backward")
            report[key] = vars(found)
            print(key, *vars(found).values(), f"{time.process_time():.0f} s", flush=True)
            caches.clear_all()
            path.write_text(json.dumps(report, indent=1))
    return summarize(report)


def _named(op: OpInfo, only: set[str]) -> bool:
    return bool({op.name, name_of(op)} & only)


def summarize(report: dict[str, Any]) -> bool:
    """Print how many operators were served, and why others were not; whether none is wrong."""
    wrong = 0
    for mode in _MODES:
        rows = {key: row for key, row in report.items() if key.endswith(" " + mode)}
        count = collections.Counter(row["how"] for row in rows.values())
        wrong += count["wrong"]
        able = sum(count.values()) - count["cannot vary"]
        print(f"{mode}: {count['served']} of {able} operators served; {dict(count)}")
        _print_reasons(
            collections.Counter(
                _without_place(row["why"]) for row in rows.values() if row["how"] == "kept out"
            )
        )
    return not wrong


def _without_place(reason: str) -> str:
    """A reason against varying sizes, without the line of the program."""
    operator, _, rest = reason.partition(" at ")
    return f"{operator}: {rest.rpartition(': ')[2]}" if rest else reason


def _print_reasons(reasons: collections.Counter[str]) -> None:
    for reason, count in reasons.most_common(60):
        print(f"{count:5} {reason}")


def main() -> int:
    """Run what the command line says."""
    os.environ["XLA_VARYING_SHAPES"] = "1"
    os.environ.setdefault("XLA_VARYING_LIMITS", programs.LIMITS)
    os.environ.setdefault("XLA_FLAGS", _XLA_FLAGS)
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    random_ones = kinds.add_parser("programs")
    random_ones.add_argument("first", type=int)
    random_ones.add_argument("end", type=int)
    database = kinds.add_parser("operators")
    database.add_argument("report", type=Path)
    database.add_argument("--all", action="store_true")
    database.add_argument("--only", nargs="*", default=[], help="names of operators")
    args = parser.parse_args()
    with programs.junk_as_padding(), programs.only_served():
        if args.kind == "programs":
            right = run_programs(args.first, args.end)
        else:
            right = run_operators(args.report, args.all, set(args.only))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
