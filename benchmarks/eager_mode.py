"""What an operator costs where each is run by itself: the first time, and again.

``python benchmarks/eager_mode.py`` measures this project's eager mode (``torch_xla.experimental.eager_mode``) and
its steps that are run one operator after the other (``SYNC_TENSORS_OPBYOP=1``), and, with ``TORCH_XLA_PYTHON``
naming an interpreter that has the official torch_xla, its eager mode. Each is a process of its own. *First* is a
call with a shape that was not there before: the operator is lowered, compiled and run. *Again* is a call whose
program there is. Both are processor time of the process (all threads) in milliseconds per operator: the median
over shapes, or over rounds. The exit status is 1 if a result is not that of PyTorch's CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

SHAPES: Final = 8
ROUNDS: Final = 7
REPEATS: Final = 100
"""Calls of each operator in a round."""
FORMS: Final = {
    "eager": {},
    "one by one": {"SYNC_TENSORS_OPBYOP": "1"},
}
"""How operators are run, and the variables that choose it."""


def operators() -> dict[str, Callable[[Any], Any]]:
    """Functions of one matrix, each of which is one operator."""
    import torch
    from torch.nn import functional as F

    return {
        "add": lambda x: x + x,
        "exp": lambda x: x.exp(),
        "sum": lambda x: x.sum(0),
        "softmax": lambda x: x.softmax(-1),
        "matmul": lambda x: torch.mm(x, x),
        "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    }


def work(form: str) -> dict[str, dict[str, Any]]:
    """The figures of one process, by operator."""
    import torch

    import torch_xla
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()
    if form == "eager":
        torch_xla.experimental.eager_mode(True)
    found = {}
    for name, function in operators().items():
        host = [torch.linspace(-1.0, 1.0, n * n).reshape(n, n) for n in range(8, 8 + SHAPES)]
        inputs = [x.to(device) for x in host]
        xm.wait_device_ops()
        first, results = [], []
        for x in inputs:
            begin = time.process_time()
            result = function(x)
            torch_xla.sync(wait=True)
            first.append(time.process_time() - begin)
            results.append(result)
        again, alike = [], [host[0].to(device) for _ in range(REPEATS)]
        xm.wait_device_ops()
        for _ in range(ROUNDS):
            begin = time.process_time()
            kept = list(map(function, alike))
            torch_xla.sync(wait=True)
            again.append((time.process_time() - begin) / REPEATS)
            del kept
        right = all(
            torch.allclose(r.cpu(), function(x), rtol=1e-4, atol=1e-4)
            for r, x in zip(results, host, strict=True)
        )
        found[name] = {
            "first_ms": statistics.median(first[1:]) * 1e3,
            "again_ms": statistics.median(again) * 1e3,
            "right": right,
        }
    return found


def measured(python: str, form: str) -> dict[str, dict[str, Any]]:
    """The figures of a process of its own."""
    kept = {k: v for k, v in os.environ.items() if "PERSISTENT_CACHE" not in k}
    # every shape is to be a new program
    given = {"PJRT_DEVICE": "CPU", "XLA_VARYING_SHAPES": "0", **FORMS[form]}
    done = subprocess.run(
        [python, str(Path(__file__).resolve()), "--worker", form],
        env={**kept, **given}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{python} failed: {done.stderr[-2000:]}")
    figures: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if a result is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", choices=list(FORMS), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(argv)
    if options.worker:
        print(json.dumps(work(options.worker)))
        return 0
    systems = {form: measured(sys.executable, form) for form in FORMS}
    if peer := os.environ.get("TORCH_XLA_PYTHON"):
        systems["torch_xla, eager"] = measured(peer, "eager")
    print(f"{'ms per operator':18}" + "".join(f"{name:>26}" for name in systems))
    print(f"{'':18}" + f"{'first':>16}{'again':>10}" * len(systems))
    for operator in operators():
        row = [systems[name][operator] for name in systems]
        print(
            f"{operator:18}" + "".join(f"{f['first_ms']:16.2f}{f['again_ms']:10.3f}" for f in row)
        )
    for ending in ("first_ms", "again_ms"):
        means = [
            math.exp(statistics.fmean(math.log(f[ending]) for f in figures.values()))
            for figures in systems.values()
        ]
        print(f"{ending}, geometric means: " + ", ".join(f"{mean:.3f}" for mean in means))
    if options.json:
        written = {"taken": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "systems": systems}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    wrong = [
        f"{s}: {o}" for s, figures in systems.items() for o, f in figures.items() if not f["right"]
    ]
    print(*wrong, sep="\n", end="", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
