"""Runs PyTorch's operator database on ``xla`` against the CPU and reports every row of it.

``python tools/op_db_report.py report.json`` adds what ``report.json`` does not have yet, so that a run
which was stopped goes on, and prints a summary. A row is an operator with its variant, a dtype and a
mode (forward, in-place, ``out=``, backward, and errors: all calls of the operator that the database
expects to fail, a row for each operator; when asked for, jvp, grad and vmap: what these transforms of
``torch.func`` make of it); a verdict is one of

right       values, shapes and dtypes are the CPU's; of errors: the CPU's exception type, when recorded
fallback    so they are, but an operator ran on the CPU
wrong       they are not, or ``xla`` takes what the CPU refuses
raises      ``xla`` raises where the CPU computes
cpu cannot  the CPU computes none of the samples: the row does not count

``XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"`` makes
compiling several times faster.
"""

from __future__ import annotations

import argparse
import collections
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import torch_xla
from xla_core.testing import op_db as compare
from xla_core.testing import op_db_transforms as transforms
from xla_core.testing.against_cpu import Outcome, attempt, fallbacks, forget_pending

DTYPES: Final = (torch.float32, torch.int64, torch.bool, torch.bfloat16)
MODES: Final = ("forward", "inplace", "out", "backward", "errors")
VERDICTS: Final = ("right", "fallback", "wrong", "raises", "cpu cannot")
# What one sample says of a whole row, the strongest last.
WORSE: Final = ("cpu cannot", "right", "raises", "wrong")
# How the CPU says that it has no kernel for a dtype that other devices may have one for.
NO_KERNEL: Final = ("not implemented for", "not supported", "unsupported")

Row = tuple[OpInfo, torch.dtype, str]


def rows(
    only: set[str],
    dtypes: Sequence[torch.dtype] = DTYPES,
    gradients: Sequence[torch.dtype] = (torch.float32,),
) -> Iterator[Row]:
    """Every row of the database, of the operators named in ``only`` if there are any.

    ``gradients`` are the dtypes that have rows of the modes backward, grad and jvp.
    """
    for op in op_db:
        if only and not {op.name, compare.name_of(op)} & only:
            continue
        if op.error_inputs_func is not None:
            yield op, torch.float32, "errors"  # each error input has a dtype of its own
        for dtype in dtypes:
            if dtype not in op.dtypes:
                continue
            yield op, dtype, "forward"
            if op.inplace_variant is not None:
                yield op, dtype, "inplace"
            if op.supports_out:
                yield op, dtype, "out"
            yield op, dtype, "vmap"
            if dtype in gradients and op.supports_autograd:
                yield op, dtype, "backward"
                yield op, dtype, "grad"
            if dtype in gradients and op.supports_forward_ad:
                yield op, dtype, "jvp"


def key_of(row: Row) -> str:
    """The name of a row in the report."""
    op, dtype, mode = row
    return f"{compare.name_of(op)} {str(dtype).removeprefix('torch.')} {mode}"


def invoke(op: OpInfo, sample: SampleInput, device: str, mode: str, turn: int) -> Any:
    """What ``mode`` of the operator gives on ``device``; of ``out=`` the given tensors."""
    if mode == "forward":
        return compare.call(op, sample, device)
    if mode == "backward":
        outcome = compare.gradients_of(op, sample, device)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value
    if mode in transforms.MODES:
        return transforms.transformed(op, sample, device, mode)
    source, args, kwargs = compare.operands(op, sample, device)
    if mode == "inplace":
        result = op.inplace_variant(source, *args, **kwargs)
        return (result, source)
    out = _places(compare.call(op, sample, "cpu"), device, whole=turn % 2 == 0)
    returned = op(source, *args, **kwargs, **_as_arguments(op, out))
    return (returned, out)


def _as_arguments(op: OpInfo, out: Any) -> dict[str, Any]:
    """``out`` as keywords: of an operator that is called by its schema each has a name of its own."""
    names = ["out"]
    if isinstance(op.op, torch._ops.OpOverloadPacket) and isinstance(out, (list, tuple)):
        forms = [getattr(op.op, name)._schema.arguments for name in op.op.overloads()]
        names = next((n for form in forms if (n := [a.name for a in form if a.is_out])), names)
    return dict(zip(names, out, strict=True)) if len(names) > 1 else {"out": out}


def _places(results: Any, device: str, whole: bool) -> Any:
    """Tensors that ``out=`` may fill: of the results' shapes, or without elements (then it resizes)."""
    if isinstance(results, torch.Tensor) and results.layout is not torch.strided:
        return results.clone().to(device)  # what may be where is a part of what such a tensor is
    if isinstance(results, torch.Tensor):
        shape = results.shape if whole else (0,)
        return torch.zeros(shape, dtype=results.dtype, device=device)
    places = [_places(r, device, whole) for r in results]
    return places if isinstance(results, list) else tuple(places)


def judge(row: Row, count: int) -> tuple[str, str]:
    """The verdict on a row, and what there is to say about it."""
    op, dtype, mode = row
    if mode == "errors":
        return judge_errors(op)
    name = compare.name_of(op)
    backward = mode in ("backward", "grad", "jvp")
    if backward and name in compare.NO_GRADIENTS:
        return "cpu cannot", compare.NO_GRADIENTS[name]
    drawn = attempt(partial(compare.chosen, op, dtype, count, requires_grad=backward))
    if drawn.error is not None:
        return "cpu cannot", repr(drawn.error)
    samples = [s for s in drawn.value if not (mode == "inplace" and s.broadcasts_input)]
    with fallbacks() as ran_on_cpu:
        expected = [attempt(partial(invoke, op, s, "cpu", mode, i)) for i, s in enumerate(samples)]
        got = computed(op, samples, mode)
    verdict, text = "cpu cannot", str(next((e.error for e in expected if e.error), ""))
    for sample, e, g in zip(samples, expected, got, strict=True):
        found = judge_sample(row, sample, e, g)
        if found is not None and WORSE.index(found[0]) >= WORSE.index(verdict):
            verdict, text = found
    if verdict == "right" and ran_on_cpu:
        return "fallback", " ".join(sorted(ran_on_cpu))
    return verdict, text


def judge_errors(op: OpInfo) -> tuple[str, str]:
    """Whether every call that the CPU refuses is refused when it is recorded, with the same type of error."""
    refused, difference = compare.errors_compared(op)
    if difference:
        return "wrong", difference
    return ("right", "") if refused else ("cpu cannot", "the CPU refuses none of them")


def computed(op: OpInfo, samples: list[SampleInput], mode: str) -> list[Outcome]:
    """What ``xla`` gives for the samples: one program for all, or each its own where that one fails."""
    got = [attempt(partial(invoke, op, s, "xla", mode, i)) for i, s in enumerate(samples)]
    if attempt(torch_xla.sync).error is None:
        return got

    def alone(sample: SampleInput, turn: int) -> Any:
        forget_pending()
        result = invoke(op, sample, "xla", mode, turn)
        torch_xla.sync()
        return result

    return [attempt(partial(alone, s, i)) for i, s in enumerate(samples)]


def judge_sample(row: Row, sample: SampleInput, e: Outcome, g: Outcome) -> tuple[str, str] | None:
    """The verdict on one sample; None where there is nothing to compare."""
    if e.error is not None:
        missing = isinstance(e.error, NotImplementedError) or any(
            words in str(e.error) for words in NO_KERNEL
        )
        if g.error is not None or missing:
            return None
        return "wrong", f"{described(sample)}: the CPU raised {e.error!r}"
    if g.error is not None:
        return "raises", f"{described(sample)}: {g.error!r}"
    compared = attempt(partial(compare_results, row, sample, e.value, g.value))
    if compared.error is None:
        return "right", ""
    return "wrong", f"{described(sample)}: {compared.error}"


def compare_results(row: Row, sample: SampleInput, expected: Any, got: Any) -> None:
    """Raise AssertionError where the results differ."""
    op, dtype, mode = row
    if mode == "backward":
        compare.assert_gradients_agree(op, sample, dtype, expected, got)
    elif mode in transforms.MODES:
        transforms.assert_agrees(op, sample, dtype, mode, expected, got)
    elif mode == "forward":
        compare.assert_agrees(op, sample, dtype, expected, got)
    else:
        for e, g in zip(expected, got, strict=True):
            compare.assert_agrees(op, sample, dtype, e, g)


def described(sample: SampleInput) -> str:
    """The sample's operands, tensors by shape and dtype, shortened."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, (list, tuple)):
            return [one(x) for x in leaf]
        return leaf

    named = {k: one(v) for k, v in sample.kwargs.items()}
    return f"{one(sample.input)}, {one(sample.args)}, {named}"[:300]


def summary(found: dict[str, list[Any]]) -> str:
    """A table of how many rows got which verdict, by dtype and mode."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for key, (verdict, *_) in found.items():
        for column in (key.split(" ", 1)[1], "all"):
            counts[column][verdict] += 1
    lines = ["| dtype and mode | rows | " + " | ".join(VERDICTS) + " |", "|---" * 7 + "|"]
    for column, count in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        total = sum(count.values()) - count["cpu cannot"]
        cells = [column, total, *(count[v] for v in VERDICTS)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    whole = counts["all"]
    total = max(1, sum(whole.values()) - whole["cpu cannot"])
    agreed = whole["right"] + whole["fallback"]
    lines += [f"{agreed / total:.2%} right, {1 - whole['fallback'] / total:.2%} without fallback"]
    return "\n".join(lines)


def dtypes_named(text: str) -> list[torch.dtype]:
    """The dtypes in a list such as ``int32,float64``."""
    return [getattr(torch, name) for name in text.split(",") if name]


def main() -> None:
    """Run the rows that the report lacks, and write it after each operator."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("report", type=Path)
    parser.add_argument("--only", default="", help="names of operators, separated by commas")
    parser.add_argument("--samples", type=int, default=4, help="of each row, at most")
    every = ",".join((*MODES, *transforms.MODES))
    parser.add_argument("--modes", default=",".join(MODES), help=f"some of {every}")
    parser.add_argument(
        "--dtypes", default="", help="instead of the usual ones, such as int32,float64"
    )
    parser.add_argument("--gradients", default="float32", help="dtypes with derivatives")
    parser.add_argument("--part", default="0/1", help="2/5: the third fifth of the rows")
    parser.add_argument("--again", default="", help="verdicts whose rows are run again")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # the database calls deprecated forms
    known = json.loads(given.report.read_text("utf-8")) if given.report.exists() else {}
    again = set(given.again.split(",")) if given.again else set()
    part, parts = map(int, given.part.split("/"))
    only = set(given.only.split(",")) if given.only else set()
    todo = list(rows(only, dtypes_named(given.dtypes) or DTYPES, dtypes_named(given.gradients)))
    todo = [row for row in todo if row[2] in given.modes.split(",")]
    todo = todo[part * len(todo) // parts : (part + 1) * len(todo) // parts]
    todo = [r for r in todo if key_of(r) not in known or known[key_of(r)][0] in again]
    for done, row in enumerate(todo, 1):
        start = time.monotonic()
        outcome = attempt(partial(judge, row, given.samples))
        forget_pending()
        verdict, text = outcome.value or ("wrong", f"the report itself: {outcome.error!r}")
        known[key_of(row)] = [verdict, text[:1000]]
        if verdict not in ("right", "cpu cannot"):
            seconds = time.monotonic() - start
            print(
                f"{done}/{len(todo)} {key_of(row)}: {verdict} ({seconds:.1f} s) {text[:500]}",
                flush=True,
            )
        if done == len(todo) or row[0] is not todo[done][0]:
            _write(given.report, known)
    print(summary(known))


def _write(report: Path, found: dict[str, list[Any]]) -> None:
    beside = report.with_suffix(".partial")
    beside.write_text(json.dumps(found, indent=0), "utf-8")
    beside.replace(report)


if __name__ == "__main__":
    main()
