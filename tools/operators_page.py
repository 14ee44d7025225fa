"""Writes docs/operators.md: which operators there are on ``xla``, how each is carried out, and what was compared.

``python tools/operators_page.py REPORT.json...`` takes the rows of reports by ``tools/op_db_report.py`` into
``operator_results.json`` and writes the page; without reports it writes the page from what is there. Reasons
stand in ``operator_reasons.toml``. ``tests/test_operators_document.py`` holds the page to the dispatcher.
"""

from __future__ import annotations

import collections
import fnmatch
import functools
import json
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch._ops import OpOverload

import torch_xla  # noqa: F401  (loads the lowering rules)
from xla_core.testing.internals import make_handler, pure_form

ROOT: Final = Path(__file__).resolve().parents[1]
DOCUMENT: Final = ROOT / "docs" / "operators.md"
RESULTS: Final = Path(__file__).with_name("operator_results.json")
REASONS: Final = Path(__file__).with_name("operator_reasons.toml")

DTYPES: Final = (
    "float32", "float64", "bfloat16", "float16", "complex64", "int64", "int32", "int8", "uint8", "bool",
)  # fmt: skip
MODES: Final = ("forward", "inplace", "out", "backward", "grad", "jvp", "vmap", "errors")
# How a verdict is written in operator_results.json: a letter for each dtype, in their order.
LETTERS: Final = {
    "right": "r", "fallback": "c", "wrong": "w", "raises": "x", "cpu cannot": ".",
}  # fmt: skip
NOT_RUN: Final = " "
WORDS: Final = {"c": "CPU", "w": "wrong", "x": "raises"}

SHORT_NAMES: Final = ("f32", "f64", "bf16", "f16", "c64", "i64", "i32", "i8", "u8", "b")
SHORT: Final = dict(zip(DTYPES, SHORT_NAMES, strict=True))
VALUES: Final = ("forward", "inplace", "out")
DERIVED: Final = ("backward", "grad", "jvp", "vmap")

LOWERED, DECOMPOSED, CPU, REFUSED = "lowered", "decomposed", "CPU", "refused"
ELSEWHERE: Final = "not for the CPU"
COMPOSITES: Final = (
    "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional",
)  # fmt: skip
# What the functions in ``dispatch`` that make handlers other than those of lowerings make of an operator.
HOW: Final = {
    "composite_handler": DECOMPOSED,
    "decomposed_handler": DECOMPOSED,
    "fallback_handler": CPU,
    "refusing_handler": REFUSED,
}
HEAD: Final = """\
# Operators

Made by `python tools/operators_page.py`; `tests/test_operators_document.py` holds it to what the dispatcher does.

An operator that is not in these tables, or that stands here as *CPU*, still works: PyTorch computes it on the
CPU, warns once, and counts it (`torch_xla.debug.metrics.counter_names()` has the operator's name). Each such call
runs the step that was being recorded, so keep it out of loops. How an operator is carried out:

| word | what happens |
|---|---|
| lowered | it is recorded, and a rule here turns it into StableHLO |
| decomposed | PyTorch defines it by other operators, which are recorded |
| CPU | the step so far runs, the CPU computes the operator, the result goes back to the device |
| refused | it raises an error that says what to use instead |
| not for the CPU | PyTorch has it for other devices only (CUDA, MIOpen, MPS): here it raises what the CPU raises |

Forms that write (`add_`, `out=`) are carried out as the form that does not.
"""
COMPARED: Final = """
## What was compared

`tools/op_db_report.py` runs PyTorch's own operator database on `xla` and on the CPU, and compares values, shapes,
dtypes and exceptions. A row is an operator with its variant, a dtype and a mode: forward, in place, `out=` (places
of the right shape, and of size 0), backward, the transforms `grad`, `jvp` (forward-mode AD) and `vmap` of
`torch.func`, and errors (all calls that must fail). Of each row two to six samples are compared, spread over the
database's list of them. Integers and booleans must be equal. For the others
[`TOLERANCES`](../packages/xla-core/src/xla_core/testing/against_cpu.py) say how far apart numbers may be; results
further apart must be as near to what a wider dtype gives as the CPU's are. Rows that the CPU cannot compute do
not count. All rows of the tables below have been run; what has no line has not (`vmap`, `grad` and `jvp` of other
dtypes than float32). The normal tests compare all errors, and one float32 sample of every operator.
Of errors only those count that are raised when the operator is recorded.
"""
DATABASE: Final = """
## Values at the edges of a dtype

`tools/dtype_report.py --edges` compares unary and binary operators with the CPU at zeros of both signs, the ends of
each dtype's range, infinities and NaN, binary ones at all pairs. What is left is as follows; some of it depends on
the length of the CPU's vectors, so that the CPU does not agree with itself.

| operators | on `xla` | on the CPU |
|---|---|---|
| all | numbers below the smallest normal one (1.2e-38 of float32) and results among them are 0 | subnormal |
| `maximum`, `minimum`, `fmax`, `fmin`, `clamp` of zeros of two signs | either | either |
| `relu(-0.0)`, `relu6(-0.0)` | 0.0 | -0.0 |
| `fmod`, `remainder` of floats whose quotient overflows, as `100 % 1e-38` | exact | NaN |
| complex `mul`, `add(alpha=)` that overflow on the way | products and sum are rounded once | NaN, infinite |
| `neg` of a complex 0; `i1`, `i1e`, `softshrink` of -0.0 | -0 | 0 |
| complex `expm1`, `sigmoid`, `silu`, `log1p`, `sinc` beside infinity | what C99's `exp` and `log` give | NaN |
| complex `sin`, `sinh`: the sign of an infinite part beside NaN, which C99 leaves open | either | either |
| `bessel_j0`, `j1`, `y0`, `y1` of infinity | 0, the limit | NaN |
| Bessel functions and `polygamma` of float64 and of large numbers | to the last digits | to 9 or 10 digits |
| floats beyond an integer's range turned into it, NaN | the nearest integer, 0 | what the processor gives |
| `ldexp` in float16 where `2 ** other` is infinite | the product | NaN |
| `square` of complex numbers that overflow | infinite | NaN beside infinite |

## PyTorch's operator database

*Right in* names the dtypes whose rows (forward, in place, `out=`) are right: f32 f64 bf16 f16 for floats, c64 for
complex64, i64 i32 i8 u8 for integers, b for bool. Where one is missing, the CPU has no kernel, its row was not run,
or the last column says what happens. *Derivatives* names the modes of which all rows that were run are right.
"""
ATEN: Final = """
## ATen's operators

All operators of PyTorch's dispatcher, by how they are carried out.
"""


def letter_table(rows: Mapping[str, Iterable[str]]) -> dict[str, dict[str, str]]:
    """Reports' rows (``"add int32 forward"`` to its verdict first) as a string of letters by operator and mode."""
    found: dict[str, dict[str, list[str]]] = {}
    for key, (verdict, *_) in rows.items():
        name, dtype, mode = key.rsplit(" ", 2)
        letters = found.setdefault(name, {}).setdefault(mode, [NOT_RUN] * len(DTYPES))
        letters[DTYPES.index(dtype)] = LETTERS[verdict]
    return {
        name: {mode: "".join(modes[mode]).rstrip() for mode in MODES if mode in modes}
        for name, modes in sorted(found.items())
    }


def rows_of(table: Mapping[str, Mapping[str, str]]) -> dict[tuple[str, str, str], str]:
    """The letter of each row, by operator, dtype and mode; rows that were not run are left out."""
    return {
        (name, dtype, mode): letter
        for name, modes in table.items()
        for mode, letters in modes.items()
        for dtype, letter in zip(DTYPES, letters, strict=False)
        if letter != NOT_RUN
    }


def load() -> dict[str, dict[str, str]]:
    """The committed results."""
    found: dict[str, dict[str, str]] = json.loads(RESULTS.read_text("utf-8"))["operators"]
    return found


def take(reports: Iterable[Path]) -> None:
    """Put the reports' rows in place of those of the same name in the committed results."""
    words = {letter: verdict for verdict, letter in LETTERS.items()}
    rows: dict[str, Any] = {}
    if RESULTS.exists():
        rows = {" ".join(key): [words[letter]] for key, letter in rows_of(load()).items()}
    for report in reports:
        rows |= json.loads(report.read_text("utf-8"))
    lines = [f'"{name}": {json.dumps(modes)}' for name, modes in letter_table(rows).items()]
    body = ",\n".join(lines)
    head = f'"torch": "{torch.__version__.split("+")[0]}", "dtypes": {json.dumps(DTYPES)}'
    RESULTS.write_text(f'{{{head},\n"operators": {{\n{body}\n}}}}\n', "utf-8")


@functools.cache
def reasons() -> dict[str, dict[str, str]]:
    """Why rows of the database, and ATen operators, are not computed on the device: by pattern of names."""
    return tomllib.loads(REASONS.read_text("utf-8"))


def reason(kind: str, name: str) -> str:
    """The reason of the first pattern that ``name`` fits; empty without one."""
    patterns = reasons()[kind].items()
    return next((why for pattern, why in patterns if fnmatch.fnmatchcase(name, pattern)), "")


def carried_out(overload: OpOverload) -> str:
    """In which of the four ways the dispatcher carries out ``overload``."""
    maker = getattr(make_handler(overload), "__qualname__", "").partition(".")[0]
    return HOW.get(maker, LOWERED)


@functools.cache
def dispatched() -> dict[str, list[str]]:
    """The ATen operators that PyTorch's dispatcher knows, each with the full names of its overloads."""
    found: dict[str, list[str]] = {}
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        name = full.partition(".")[0].removeprefix("aten::")
        if full.startswith("aten::") and not name.startswith(("_test_", "_foobar")):
            found.setdefault(name, []).append(full)
    return found


def has_kernel(full: str, keys: Iterable[str]) -> bool:
    """Whether the overload of this full name has a kernel under one of these dispatch keys."""
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(full, key) for key in keys)


def is_made_in_cpp(full: str, overload: OpOverload) -> bool:
    """Whether PyTorch makes the result by other operators before anything here is asked: no operand says so."""
    operands = any("Tensor" in str(argument.type) for argument in overload._schema.arguments)
    return not operands and has_kernel(full, COMPOSITES) and not has_kernel(full, ("XLA",))


def ways(name: str) -> list[str]:
    """How the overloads of an ATen operator are carried out, each way once; forms that write follow the pure ones.

    Empty if all of them do as a pure form of another name does (``add_`` as ``add``).
    """
    packet = getattr(torch.ops.aten, name)
    found = []
    for full in dispatched()[name]:
        overload = getattr(packet, full.partition(".")[2] or "default")
        if not overload._schema.is_mutable or pure_form(overload) is None:
            here = carried_out(overload)
            if here == CPU and is_made_in_cpp(full, overload):
                here = DECOMPOSED
            elif here == CPU and not has_kernel(full, ("CPU", "XLA", *COMPOSITES)):
                here = ELSEWHERE
            found.append(here)
    return list(dict.fromkeys(found))


def aten_rows() -> list[str]:
    """The table of ATen's operators."""
    lines = ["| operator | how | why |", "|---|---|---|"]
    for name in dispatched():
        found = ways(name)
        why = reason("aten", name) if {CPU, REFUSED} & set(found) else ""
        if found:
            lines.append(f"| `{name}` | {', '.join(found)} | {why} |")
    return lines


def aten_name(name: str) -> str | None:
    """The ATen operator that a name of the database with its variant (``linalg.norm.subgradients``) is about."""
    parts = name.removeprefix("nn.functional.").split(".")
    joined = ("_".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((found for found in joined if found in dispatched()), None)


def database_rows(table: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The table of the database's operators."""
    lines = [
        "| operator | how | right in | derivatives, `torch.func` | else |",
        "|---|---|---|---|---|",
    ]
    for name, modes in table.items():
        about = aten_name(name)
        how = ", ".join(ways(about)) if about else DECOMPOSED
        values = [(dtype, letter) for mode in VALUES for dtype, letter in _letters(modes, mode)]
        wrong = {dtype for dtype, letter in values if letter in WORDS}
        right = [d for d in DTYPES if (d, "r") in values and d not in wrong]
        derived = [
            mode
            for mode in DERIVED
            if "r" in modes.get(mode, "") and not set(modes[mode]) & set(WORDS)
        ]
        shown = "all" if len(right) == len(DTYPES) else " ".join(SHORT[d] for d in right)
        other = {WORDS[x] for mode in modes for _, x in _letters(modes, mode) if x in WORDS}
        remark = f"{', '.join(sorted(other))}: {reason('database', name)}" if other else ""
        lines.append(f"| `{name}` | {how} | {shown} | {', '.join(derived)} | {remark} |")
    return lines


def _letters(modes: Mapping[str, str], mode: str) -> list[tuple[str, str]]:
    return list(zip(DTYPES, modes.get(mode, ""), strict=False))


def figures(table: Mapping[str, Mapping[str, str]]) -> list[str]:
    """How many rows got which verdict, by mode and dtype."""
    counts: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    for (_, dtype, mode), letter in rows_of(table).items():
        for column in ((mode, dtype), ("all", "")):
            counts[column][letter] += 1
    order = [(mode, dtype) for mode in MODES for dtype in DTYPES] + [("all", "")]
    lines = [
        "| rows of | number | right | | of them on the CPU | wrong | raise |",
        "|---|---|---|---|---|---|---|",
    ]
    for column in order:
        count = counts.get(column, collections.Counter())
        total = sum(count.values()) - count["."]
        if total:
            right = count["r"] + count["c"]
            cells = (
                " ".join(column).strip(),
                total,
                right,
                f"{right / total:.1%}",
                count["c"],
                count["w"],
                count["x"],
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def render() -> str:
    """The page."""
    table = load()
    parts = [
        HEAD,
        COMPARED,
        "\n".join(figures(table)),
        DATABASE,
        "\n".join(database_rows(table)),
        ATEN,
    ]
    return "\n".join([*parts, "\n".join(aten_rows())]) + "\n"


def main() -> None:
    """Take the reports that are named, and write the page."""
    if reports := [Path(name) for name in sys.argv[1:]]:
        take(reports)
    DOCUMENT.write_text(render(), "utf-8")


if __name__ == "__main__":
    main()
