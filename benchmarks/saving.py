"""Measures the host memory that saving a model takes: ``xser.save`` streams one tensor at a time.

``python benchmarks/saving.py`` makes a model of ``--megabytes`` (default 500) in ``--tensors`` (default
20) tensors, one of them twice as large as the others, saves it with ``xser.save``, ``xm.save`` and, to
compare, through a state dict on the CPU, each in a process of its own, and loads it back. Resident
memory is sampled every millisecond from /proc. On the CPU device the tensors themselves lie in host
memory: they are in the baseline, which is taken right before saving. The exit status is 1 if
``xser.save`` or ``xm.save`` takes more than 1.3 times the largest tensor above the baseline, or if what
is loaded is not what was saved.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

LIMIT: Final = 1.3
MEGABYTE: Final = 1_000_000
WAYS: Final = ("xser.save", "xm.save", "torch.save of a copy on the CPU")


class Watch:
    """The largest resident memory of this process while a ``with`` block runs, in bytes."""

    def __init__(self) -> None:
        self.before = self.highest = 0
        self._over = threading.Event()

    def __enter__(self) -> Watch:
        self.before = self.highest = resident()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        return self

    def __exit__(self, *_details: object) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._over.wait(0.001):
            self.highest = max(self.highest, resident())


def resident() -> int:
    """Resident memory of this process without what maps files, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no line RssAnon; this benchmark needs Linux 4.5")


def sizes(total: int, count: int) -> list[int]:
    """Bytes of each tensor: equal but for the last, which is twice as large."""
    share = total // (count + 1)
    return [share] * (count - 1) + [2 * share]


def measure(way: str, megabytes: int, count: int) -> dict[str, Any]:
    """Save (and load) once in this process."""
    import torch

    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.utils.serialization as xser
    from xla_core.testing.internals import release_free_memory

    state = {
        f"layer{i}.weight": torch.full((nbytes // 4,), float(i), device="xla")
        for i, nbytes in enumerate(sizes(megabytes * MEGABYTE, count))
    }
    torch_xla.sync(wait=True)
    saves: dict[str, Callable[[Any, Path], Any]] = {
        "xser.save": xser.save,
        "xm.save": xm.save,
        WAYS[2]: lambda data, path: torch.save({k: v.cpu() for k, v in data.items()}, path),
    }
    small = {"x": torch.ones(8, device="xla")}
    with tempfile.TemporaryDirectory() as folder:
        saves[way](small, Path(folder) / "first.pt")  # what a first call imports is no part of it
        path = Path(folder) / "model.pt"
        release_free_memory()  # else what saving hands back would hide what it takes
        with Watch() as watch:
            started = time.perf_counter()
            saves[way](state, path)
            seconds = time.perf_counter() - started
        loaded = xser.load(path)
        same = all(torch.equal(loaded[k], v.cpu()) for k, v in state.items())
        written = path.stat().st_size
    largest = max(v.numel() * v.element_size() for v in state.values())
    above = watch.highest - watch.before
    return {
        "way": way,
        "seconds": seconds,
        "file_megabytes": written / MEGABYTE,
        "baseline_megabytes": watch.before / MEGABYTE,
        "above_baseline_megabytes": above / MEGABYTE,
        "largest_tensor_megabytes": largest / MEGABYTE,
        "ratio": above / largest,
        "loaded_equal": same,
    }


def in_a_process(way: str, megabytes: int, count: int) -> dict[str, Any]:
    """``measure`` in a fresh process."""
    command = [sys.executable, __file__, "--way", way]
    command += ["--megabytes", str(megabytes), "--tensors", str(count)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, object] = json.loads(done.stdout)
    return figures


def main() -> int:
    """Measure every way, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--tensors", type=int, default=20)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.way:
        print(json.dumps(measure(chosen.way, chosen.megabytes, chosen.tensors)))
        return 0
    found = [in_a_process(way, chosen.megabytes, chosen.tensors) for way in WAYS]
    print(f"{'way':34} {'seconds':>8} {'above MB':>9} {'largest MB':>11} {'ratio':>6}")
    for f in found:
        above, largest = f["above_baseline_megabytes"], f["largest_tensor_megabytes"]
        print(f"{f['way']:34} {f['seconds']:8.2f} {above:9.1f} {largest:11.1f} {f['ratio']:6.2f}")
    if chosen.json:
        content = {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "ways": found,
        }
        chosen.json.write_text(json.dumps(content, indent=1) + "\n")
    streamed = [f for f in found if f["way"] in WAYS[:2]]
    good = all(f["ratio"] <= LIMIT for f in streamed) and all(f["loaded_equal"] for f in found)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
