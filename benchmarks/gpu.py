"""Training steps on a GPU: this project against PyTorch and jax, on GPT-2 medium, BERT-base and ResNet-50.

``python benchmarks/gpu.py --out figures.json`` on a machine with a GPU; ``--device cpu --tiny`` runs the same code
on the CPU with models that are too small to say anything. Each model and way runs in a process of its own, and
within ``--limit`` seconds; ways of this project run twice, to have the first step cold and warm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

import gpu_models

Figures = dict[str, Any]
Step = Callable[[], Any]

OURS: Final = ("lazy", "captured", "openxla")
WAYS: Final = (*OURS, "eager", "inductor", "max-autotune", "jax")
RATE: Final = 1e-4
AGREE: Final = 0.03
"""How far losses after the same number of steps may lie apart: bfloat16 sums differ in their order."""


def optimizer_of(
    model: torch.nn.Module, size: gpu_models.Size, fused: bool
) -> torch.optim.Optimizer:
    """SGD with momentum for images, AdamW for text; ``fused`` is the fastest form of CUDA PyTorch."""
    if size.family == "resnet":
        return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, fused=fused)
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=fused)


def torch_step(
    size: gpu_models.Size, device: torch.device, compiled: Callable[[Any], object]
) -> Step:
    """A step of PyTorch on ``device``; ``compiled`` makes of the model what is run."""
    model = gpu_models.model_of(size).to(device)
    optimizer = optimizer_of(model, size, fused=device.type == "cuda")
    inputs, labels = (part.to(device) for part in gpu_models.batch_of(size))
    called = compiled(model)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = gpu_models.loss_of(called, inputs, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class Way:
    """One way to run a step: ``step()`` hands it over, ``wait()`` returns when it is done."""

    def __init__(self, name: str, size: gpu_models.Size, place: str) -> None:
        self.name, self.place = name, place
        self.read: Callable[[Any], float] = float
        if name == "jax":
            import gpu_jax

            self.step, self.read = gpu_jax.build(size)
        elif name in OURS:
            self.step = self._ours(size)
        else:
            self.step = torch_step(size, torch.device(place), self._compiler())

    def _compiler(self) -> Callable[[Any], Any]:
        if self.name == "eager":
            return lambda model: model
        mode = "max-autotune" if self.name == "max-autotune" else None
        return lambda model: torch.compile(model, mode=mode)

    def _ours(self, size: gpu_models.Size) -> Step:
        import torch_xla
        from torch_xla.experimental import capture

        device = torch.device("xla")
        if self.name == "openxla":
            return _synced(
                torch_step(size, device, lambda model: torch.compile(model, backend="openxla"))
            )
        plain = torch_step(size, device, lambda model: model)
        return capture.capture(plain) if self.name == "captured" else torch_xla.compile(plain)

    def wait(self, last: Any) -> None:
        """Return when the step that gave ``last`` is done."""
        if self.name == "jax":
            last.block_until_ready()
        elif self.name in OURS:
            import torch_xla

            torch_xla.sync(wait=True)
        elif self.place == "cuda":
            torch.cuda.synchronize()

    def peak_bytes(self) -> int | None:
        """The most memory that tensors and programs took; None where nobody counts."""
        if self.name == "jax":
            import jax

            return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        if self.name in OURS:
            import torch_xla.core.xla_model as xm

            return int(xm.get_memory_info("xla:0")["peak_bytes_used"])
        return torch.cuda.max_memory_allocated() if self.place == "cuda" else None


def _synced(step: Step) -> Step:
    import torch_xla

    def synced() -> Any:
        loss = step()
        torch_xla.sync()
        return loss

    return synced


@contextlib.contextmanager
def watched_gpu() -> Iterator[list[float]]:
    """Shares of time in which the GPU computed, as nvidia-smi samples them meanwhile; empty without it."""
    shares: list[float] = []
    command = shutil.which("nvidia-smi")
    if command is None:
        yield shares
        return
    query = [command, "-i", "0", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    with subprocess.Popen([*query, "-lms", "100"], stdout=subprocess.PIPE, text=True) as watcher:
        try:
            yield shares
        finally:
            watcher.terminate()
            found, _ = watcher.communicate()
            shares += [float(line) / 100 for line in found.split() if line.isdigit()]


def measure(name: str, size: gpu_models.Size, place: str, steps: int) -> Figures:
    """Figures of one way, in this process."""
    begin = time.perf_counter()
    way = Way(name, size, place)
    built = time.perf_counter()
    losses = [way.step()]
    way.wait(losses[0])
    first = time.perf_counter()
    for _ in range(5):  # captured steps are recorded in them, autotuning ends
        losses.append(way.step())
        way.wait(losses[-1])
    values = [way.read(loss) for loss in losses]
    with watched_gpu() as shares:
        started, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            last = way.step()
        issued = time.perf_counter()
        way.wait(last)
        done = time.perf_counter()
        cpu = time.process_time() - used
    settled = shares[2:-1]  # nvidia-smi's samples reach back before the first step
    return {
        "build_s": built - begin,
        "first_step_s": first - built,
        "step_ms": (done - started) / steps * 1e3,
        "issue_ms": (issued - started) / steps * 1e3,
        "host_cpu_ms": cpu / steps * 1e3,
        "per_second": size.items * steps / (done - started),
        "gpu_idle": 1 - sum(settled) / len(settled) if settled else None,
        "peak_bytes": way.peak_bytes(),
        "losses": values,
        "steps": steps,
    }


def machine() -> Figures:
    """Where the figures were taken."""
    found: Figures = {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
    }
    if command := shutil.which("nvidia-smi"):
        query = "name,driver_version,memory.total,clocks.max.sm,power.limit"
        asked = [command, f"--query-gpu={query}", "--format=csv,noheader"]
        found["gpus"] = subprocess.run(asked, capture_output=True, text=True).stdout.splitlines()
    # not the metadata: those of the wheel at PyPI leave out which build it is (+cu132)
    found["torch"] = torch.__version__
    for package in ("jax", "jaxlib", "jax-cuda13-pjrt", "jax-cuda12-pjrt", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def in_child(model: str, way: str, options: argparse.Namespace, cache: str) -> Figures:
    """``measure`` in a process of its own; ``{"error": ...}`` where it fails or takes too long."""
    environment = dict(os.environ)
    if way in OURS:
        device = "CUDA" if options.device == "cuda" else "CPU"
        environment |= {"PJRT_DEVICE": device, "XLA_PERSISTENT_CACHE_PATH": cache}
    elif way == "jax":
        environment["JAX_PLATFORMS"] = options.device
    command = [sys.executable, __file__, "--child", model, way, "--device", options.device]
    command += ["--steps", str(options.steps), *(["--tiny"] if options.tiny else [])]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=options.limit
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {options.limit} s"}
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def run(options: argparse.Namespace) -> Figures:
    """Figures of all models and ways; what does not fit into the time budget is left out, and says so."""
    end = time.monotonic() + options.budget
    results: Figures = {"machine": machine(), "figures": {}}
    for model in options.models:
        for way in options.ways:
            with tempfile.TemporaryDirectory() as cache:
                if time.monotonic() > end:
                    results["figures"][f"{model} {way}"] = {"error": "left out: the time is spent"}
                    continue
                found = in_child(model, way, options, cache)
                if way in OURS and "error" not in found and time.monotonic() < end:
                    again = in_child(model, way, options, cache)
                    found["first_step_warm_s"] = again.get("first_step_s")
            results["figures"][f"{model} {way}"] = found
            print(
                f"{model} {way}: {found.get('error') or shown(found)}", file=sys.stderr, flush=True
            )
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n")
    return results


def shown(found: Figures) -> str:
    """The figures of one way in a line."""
    idle = f"{found['gpu_idle']:.0%}" if found["gpu_idle"] is not None else "unknown"
    return f"{found['step_ms']:.1f} ms a step, {found['per_second']:.0f} a second, GPU idle {idle}"


def table(results: Figures) -> str:
    """The figures as a table of Markdown."""
    columns = (
        "step_ms",
        "issue_ms",
        "host_cpu_ms",
        "per_second",
        "first_step_s",
        "first_step_warm_s",
    )
    lines = [
        f"| run | {' | '.join(columns)} | GPU idle | peak GiB |",
        "|---" * (len(columns) + 3) + "|",
    ]
    for name, found in results["figures"].items():
        if "error" in found:
            lines.append(f"| {name} | {found['error']} |" + " |" * (len(columns) + 1))
            continue
        cells = [f"{found[c]:.4g}" if found.get(c) is not None else "" for c in columns]
        idle = "" if found["gpu_idle"] is None else f"{found['gpu_idle']:.1%}"
        peak = "" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 2**30:.2f}"
        lines.append(f"| {name} | {' | '.join(cells)} | {idle} | {peak} |")
    return "\n".join(lines)


def disagreements(results: Figures) -> list[str]:
    """Ways whose losses after the same steps are not those of the others."""
    found: dict[str, list[tuple[str, list[float]]]] = {}
    for name, figures in results["figures"].items():
        if "losses" in figures:
            found.setdefault(name.split()[0], []).append((name, figures["losses"]))
    told = []
    for runs in found.values():
        reference = runs[0][1]
        for name, losses in runs[1:]:
            apart = max(abs(a - b) / abs(a) for a, b in zip(reference, losses, strict=True))
            if not apart <= AGREE:
                told.append(f"{name}: losses {losses}, those of {runs[0][0]} are {reference}")
    return told


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table; 1 where a way failed, or its losses are not those of the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--models", nargs="+", choices=gpu_models.SIZES, default=list(gpu_models.SIZES)
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of a few weights")
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed")
    parser.add_argument("--limit", type=float, default=240, help="seconds that one way may take")
    parser.add_argument(
        "--budget", type=float, default=1500, help="seconds after which none is begun"
    )
    parser.add_argument("--out", type=Path, help="file for the figures, written after each way")
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        model, way = options.child
        size = (gpu_models.TINY if options.tiny else gpu_models.SIZES)[model]
        print(json.dumps(measure(way, size, options.device, options.steps)))
        return 0
    results = run(options)
    print(table(results))
    told = disagreements(results)
    print("\n".join(told), file=sys.stderr)
    failed = any("error" in found for found in results["figures"].values())
    return int(failed or bool(told))


if __name__ == "__main__":
    sys.exit(main())
