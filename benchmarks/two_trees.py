"""What a change of the sources costs the host: two trees, measured by turns.

``python benchmarks/two_trees.py BEFORE AFTER`` takes two checkouts (``git worktree add`` makes the second one).
In each round a process per tree measures the same things, in alternating order, and the figure is the median
ratio of the rounds, with the interval that holds the true median with 95 % certainty: one process differs
from the next by several percent, however long it runs. Times are the processor's, of the thread that
records (of the process, for imports), and a process gives its fastest tenth, so that other work on the machine
moves them little. The exit status is 1 if a whole interval lies above the limit of 2 %.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

GROUPS: Final = ("xla_core.extensions", "xla_core.devices")
LIMIT: Final = 1.02
SURE: Final = 0.95

WORKER: Final = """
import json, sys, time
begin = time.process_time()
import torch, torch_xla
torch_xla.device()
figures = {"import and first device": time.process_time() - begin}
clock, repeats = time.thread_time, int(sys.argv[1])

def quiet(run, count):
    for _ in range(max(3, count // 5)):
        run()
    return sorted(run() for _ in range(count))[count // 10]

x = torch.ones(8, device="xla")
torch_xla.sync()

def operators():
    y, begin = x, clock()
    for _ in range(100):
        y = y * 1.5
        y = y + x
    took = clock() - begin
    torch_xla.sync(wait=True)
    return took / 200

def sync():
    y = x * 1.5
    begin = clock()
    torch_xla.sync()
    return clock() - begin

model = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(16, 16), torch.nn.ReLU())])
model.to("xla")
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
inputs = torch.randn(8, 16).to("xla")

def step():
    begin = clock()
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
    torch_xla.sync()
    return clock() - begin

figures["operator"] = quiet(operators, repeats)
figures["sync() of one operator"] = quiet(sync, 10 * repeats)
figures["training step"] = quiet(step, 2 * repeats)
print(json.dumps(figures))
"""


def metadata(tree: Path, names: Iterable[str], folder: Path) -> Path:
    """A folder that says of the packages ``names`` what ``tree`` says: their entry points, none where it lacks one.

    Before the others on the path it hides what is installed under these names, from whichever tree.
    """
    for name in names:
        file = tree / "packages" / name / "pyproject.toml"
        project = tomllib.loads(file.read_text())["project"] if file.is_file() else {}
        info = folder / f"{name.replace('-', '_')}-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {project.get('version', '0')}\n")
        groups = project.get("entry-points", {})
        lines = [
            f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items())
            for g, points in groups.items()
        ]
        (info / "entry_points.txt").write_text("".join(lines))
    return folder


def measured(tree: Path, described: Path, repeats: int) -> dict[str, float]:
    """Seconds by name, from a new process with the sources of ``tree``; for ``described`` see ``metadata``."""
    sources = os.pathsep.join(map(str, [described, *sorted(tree.glob("packages/*/src"))]))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "PJRT_"))}
    environment = {**kept, "PYTHONPATH": sources, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(repeats)],
        env=environment, cwd=tree, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which of ``values`` the median of their distribution is, with 95 % certainty."""
    ordered, count = sorted(values), len(values)
    cut, outside = 0, 0.0
    while cut < count // 2:
        outside += math.comb(count, cut) / 2**count
        if 2 * outside > 1 - SURE:
            break
        cut += 1
    cut = max(0, cut - 1)
    return ordered[cut], ordered[count - 1 - cut]


def compared(before: Path, after: Path, rounds: int, repeats: int) -> dict[str, dict[str, float]]:
    """By figure: both medians in microseconds, the median ratio, and the interval that it lies in."""
    trees = (before, after)
    names = {path.parent.name for tree in trees for path in tree.glob("packages/*/pyproject.toml")}
    points = [p for group in GROUPS for p in importlib.metadata.entry_points(group=group)]
    names |= {point.dist.name for point in points if point.dist is not None}
    folder = Path(tempfile.mkdtemp())
    described = [metadata(tree, names, folder / str(index)) for index, tree in enumerate(trees)]
    taken: dict[str, list[tuple[float, float]]] = {}
    for number in range(-1, rounds):  # the first round writes byte code, and does not count
        order = (0, 1) if number % 2 else (1, 0)
        both = {index: measured(trees[index], described[index], repeats) for index in order}
        for name in both[0] if number >= 0 else ():
            taken.setdefault(name, []).append((both[0][name], both[1][name]))
    shutil.rmtree(folder)
    figures = {}
    for name, pairs in taken.items():
        ratios = [new / old for old, new in pairs]
        low, high = interval(ratios)
        figures[name] = {
            "before_us": statistics.median(old for old, _ in pairs) * 1e6,
            "after_us": statistics.median(new for _, new in pairs) * 1e6,
            "ratio": statistics.median(ratios), "low": low, "high": high,
        }  # fmt: skip
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=50, help="runs of each figure in a process")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    given = parser.parse_args(arguments)
    before, after = given.before.resolve(), given.after.resolve()
    figures = compared(before, after, given.rounds, given.repeats)
    for name, row in figures.items():
        print(
            f"{name:26} {row['before_us']:12.1f} us {row['after_us']:12.1f} us"
            f"  {row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        )
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(any(row["low"] > LIMIT for row in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
