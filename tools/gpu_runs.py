"""All that is to be run on a GPU, one command each: ``python tools/gpu_runs.py --out DIR`` runs them in this order.

``--only conformance main-job`` runs some of them, ``--list`` prints the commands. Every run has a time limit, all
together less than an hour. The output of each goes to DIR/NAME.log; DIR/runs.json and the table at the end say what
passed, in what time, on which machine. With ``--device cpu`` the runs use the CPU, in a small part: that shows that
the runs themselves work, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
_CORE: Final = "packages/xla-core/tests"
_PYTEST: Final = ("-m", "pytest", "-q", "-p", "no:cacheprovider")


@dataclasses.dataclass(frozen=True)
class Run:
    """One command, by the arguments of Python; ``{out}`` is the folder of results."""

    name: str
    seconds: int
    arguments: tuple[str, ...]
    on_cpu: tuple[str, ...] = ()
    """What is added where there is no GPU."""


RUNS: Final = (
    Run("conformance", 240, (*_PYTEST, "packages/xla-pjrt-cuda/tests")),
    Run("main-job", 180, ("examples/train_digits.py", "--cache", "{out}/cache"), ("--epochs", "1")),
    Run("training", 300, (*_PYTEST, f"{_CORE}/torch_features/test_training.py",
                          f"{_CORE}/torch_features/test_optimizers.py",
                          f"{_CORE}/torch_features/test_mixed_precision.py")),
    Run("operators", 420, ("tools/op_db_report.py", "{out}/operators.json", "--samples", "1",
                           "--dtypes", "float32,bfloat16,int64", "--part", "0/8"),
        ("--only", "add,mm")),
    Run("random-programs", 240, (*_PYTEST, f"{_CORE}/testing/test_random_programs.py",
                                 f"{_CORE}/testing/test_planted_programs.py"),
        ("-k", "equal_the_cpu and 290")),
    Run("benchmarks", 1800, ("benchmarks/gpu.py", "--budget", "1400", "--out", "{out}/benchmarks.json"),
        ("--device", "cpu", "--tiny", "--models", "bert", "--ways", "eager", "jax", "--steps", "2")),
)  # fmt: skip


def command(run: Run, out: Path, device: str) -> list[str]:
    """The command line of a run on ``cuda`` or ``cpu``."""
    added = run.on_cpu if device == "cpu" else ()
    return [sys.executable, *(part.format(out=out) for part in (*run.arguments, *added))]


def environment(device: str) -> dict[str, str]:
    """The variables that runs on ``device`` see: all of them, also the tests, use it."""
    chosen = {"PJRT_DEVICE": device.upper(), "TEST_PJRT_DEVICE": device.upper()}
    if device == "cuda":
        # tests start processes of their own, which share the GPU
        chosen["XLA_PYTHON_CLIENT_PREALLOCATE"] = "0"
    return {**os.environ, **chosen}


def carry_out(run: Run, out: Path, device: str) -> dict[str, Any]:
    """Run one of them; its verdict, its time and the last line that it printed."""
    log = out / f"{run.name}.log"
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command(run, out, device),
            cwd=ROOT, env=environment(device), stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(run.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    verdict = "out of time" if code is None else "passed" if code == 0 else f"failed ({code})"
    lines = log.read_text(errors="replace").strip().splitlines()
    return {
        "verdict": verdict,
        "seconds": round(time.monotonic() - started, 1),
        "limit": run.seconds,
        "last_line": lines[-1] if lines else "",
    }


def machine() -> dict[str, Any]:
    """The GPU, its driver, and the processors."""
    found: dict[str, Any] = {"cpus": os.cpu_count(), "python": sys.version.split()[0]}
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        query = "--query-gpu=name,driver_version,memory.total"
        asked = subprocess.run(
            [tool, query, "--format=csv,noheader"], capture_output=True, text=True
        )
        found["gpus"] = asked.stdout.splitlines()
    return found


def table(results: dict[str, Any]) -> str:
    """The verdicts as a table of Markdown."""
    lines = ["| run | verdict | seconds | last line |", "|---|---|---|---|"]
    for name, found in results["runs"].items():
        lines.append(f"| {name} | {found['verdict']} | {found['seconds']} | {found['last_line']} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; 1 where one of them did not pass."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("gpu-runs"), help="folder of results")
    parser.add_argument(
        "--only", nargs="+", choices=[run.name for run in RUNS], help="some of them"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    given = parser.parse_args(argv)
    out = given.out.resolve()
    chosen = [run for run in RUNS if given.only is None or run.name in given.only]
    if given.list:
        for run in chosen:
            print(
                f"{run.name} (at most {run.seconds} s): {' '.join(command(run, out, given.device))}"
            )
        return 0
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": machine(), "device": given.device, "runs": {}}
    for run in chosen:
        results["runs"][run.name] = carry_out(run, out, given.device)
        (out / "runs.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results["machine"]))
    print(table(results))
    return int(any(found["verdict"] != "passed" for found in results["runs"].values()))


if __name__ == "__main__":
    sys.exit(main())
