"""Reports what ``XLA_VARYING_SHAPES=1`` serves, and whether exactly: random programs, and PyTorch's operators.

``python tools/varying_report.py programs 0 2000`` runs the random programs of these seeds with one or two varying
dimensions, padding of NaN, and prints the smallest part of each that differs from the CPU.

``python tools/varying_report.py operators report.json`` varies one size of the samples of the operators that
transformers, convolutional and recurrent nets use (``--all``: of all operators), forward and backward. It adds
to ``report.json`` what is not there yet, so that a run which was stopped goes on, and prints a summary: served
exactly, kept out and why, wrong, or not to be varied (the CPU takes no sample with another size).

``python tools/varying_report.py table [report.json]`` takes a report into ``varying_results.json``, and writes the
table of docs/shapes.md from what is there.

Steps that no program for a bound serves are not run, only recorded: they are compared elsewhere. Exits with 1 if
anything is wrong.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Final

from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

from xla_core.extension_api.programs import kept_from_varying
from xla_core.support import caches
from xla_core.testing.lengths import operators, programs
from xla_core.testing.op_db import name_of

# Several times faster to compile.
_XLA_FLAGS: Final = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
_MODES: Final = ("forward", "backward")
_ROOT: Final = Path(__file__).resolve().parents[1]
DOCUMENT: Final = _ROOT / "docs" / "shapes.md"
RESULTS: Final = Path(__file__).with_name("varying_results.json")
BEGIN, END = "<!-- operators: begin -->\n", "<!-- operators: end -->\n"
_NETS, _OTHERS = "transformers, CNNs, recurrent nets", "others"
_LONGEST_REASON: Final = 150


def run_programs(first: int, end: int) -> bool:
    """Run the programs of seeds from ``first`` to below ``end``; whether none differs."""
    served = wrong = unserved = 0
    reasons: collections.Counter[str] = collections.Counter()
    for seed in range(first, end):
        program = programs.make_program(seed)
        found = programs.outcome(program)
        served += found.served
        unserved += not found.served
        reasons.update(_without_place(reason) for reason in kept_from_varying())
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


def take_in(path: Path) -> None:
    """Add the rows of a report to ``varying_results.json``."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for key, row in json.loads(path.read_text()).items():
        results[key] = [row["how"], row["served"], row["tried"], _reason(row)]
    rows = (f"{json.dumps(key)}: {json.dumps(results[key])}" for key in sorted(results))
    RESULTS.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def _reason(row: dict[str, Any]) -> str:
    if row["served"] == row["tried"]:
        return ""
    reason = _without_place(row["why"]).replace("|", "/").replace("\n", " ")
    return reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON] + "..."


def table(results: dict[str, list[Any]]) -> str:
    """The tables of docs/shapes.md: how many operators are served, and those of which some samples are not."""
    lines = [
        "| operators of | mode | can vary | served | | wrong |",
        "|---|---|---|---|---|---|",
    ]
    for group in (_NETS, _OTHERS):
        for mode in _MODES:
            words = [row[0] for key, row in results.items() if _is_in(key, group, mode)]
            able = len(words) - words.count("cannot vary")
            if able:
                served, wrong = words.count("served"), words.count("wrong")
                share = f"{100 * served / able:.1f}%"
                lines.append(f"| {group} | {mode} | {able} | {served} | {share} | {wrong} |")
    lines += ["", "| not served, or in part | mode | samples | why |", "|---|---|---|---|"]
    for group in (_NETS, _OTHERS):
        for key, (how, served, tried, why) in results.items():
            name, _, mode = key.rpartition(" ")
            if _is_in(key, group, mode) and served < tried and (group == _NETS or how != "served"):
                lines.append(f"| `{name}` | {mode} | {served} of {tried} | {_quoted(why)} |")
    return "\n".join(lines) + "\n"


def _quoted(reason: str) -> str:
    return f"`{reason}`" if reason and not reason.startswith("served ") else reason


def _is_in(key: str, group: str, mode: str) -> bool:
    """Whether a row of the results is of a group of operators and a mode."""
    name, _, row_mode = key.rpartition(" ")
    return row_mode == mode and (name in _nets()) == (group == _NETS)


@functools.cache
def _nets() -> frozenset[str]:
    """The full names, with variants, of the operators that nets use."""
    return frozenset(name_of(op) for op in op_db if op.name in operators.NETS)


def write_table() -> None:
    """Write the tables between the marks in docs/shapes.md."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table(json.loads(RESULTS.read_text()))}\n{END}{after}")


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
    page = kinds.add_parser("table")
    page.add_argument("report", type=Path, nargs="?")
    args = parser.parse_args()
    if args.kind == "table":
        if args.report is not None:
            take_in(args.report)
        write_table()
        return 0
    with programs.junk_as_padding(), programs.only_served():
        if args.kind == "programs":
            right = run_programs(args.first, args.end)
        else:
            right = run_operators(args.report, args.all, set(args.only))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
