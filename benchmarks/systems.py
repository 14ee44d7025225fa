"""The systems a workload is measured on, behind one small interface.

``xla`` is this project, ``xla_inlined`` the same with its outlining of repeats turned off,
``torch_xla`` the official package (same API, another interpreter), ``jax`` the same model written in
jax (GPTs only), ``cpu`` PyTorch's eager CPU. Runs on torch 2.9 and later.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch

import workloads

READING_A_VALUE = "aten::_local_scalar_dense"
"""What ``.item()`` counts as there: the harness reads the losses with it."""


class System(Protocol):
    """What the harness asks of a system."""

    def build(self, workload: str) -> Callable[[], Any]:
        """The step of a workload on this system; what it returns has ``item()``."""
        ...

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any] | None:
        """What replays ``step``, on the same model; None where there is no such thing."""
        ...

    def sync(self) -> None:
        """End the step; may return before the work is done."""
        ...

    def wait(self) -> None:
        """Return when all work is done."""
        ...

    def programs(self) -> int | None:
        """Programs compiled or loaded so far; None where nothing is compiled."""
        ...

    def cached_programs(self) -> int | None:
        """How many of them came from the persistent cache; None where nothing is compiled."""
        ...

    def fallbacks(self) -> dict[str, int]:
        """Operators that ran on the CPU instead, with counts."""
        ...

    def executable_seconds(self, repeats: int) -> float | None:
        """Mean time of the last program alone, on buffers of its own; None where unknown."""
        ...


class EagerCPU:
    """PyTorch's CPU: every step is done when it returns."""

    def build(self, workload: str) -> Callable[[], Any]:
        """The step on the CPU."""
        return workloads.build(workload, torch.device("cpu"))

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any] | None:
        """None: every step runs its Python."""
        return None

    def sync(self) -> None:
        """Eager: there is no step to end."""
        return

    def wait(self) -> None:
        """Eager: nothing is ever outstanding."""
        return

    def programs(self) -> int | None:
        """None: nothing is compiled."""
        return None

    def cached_programs(self) -> int | None:
        """None: nothing is compiled."""
        return None

    def fallbacks(self) -> dict[str, int]:
        """None of its operators runs elsewhere."""
        return {}

    def executable_seconds(self, repeats: int) -> float | None:
        """None: there is no program."""
        return None


class LazyXLA:
    """What this project and the official torch_xla have in common: the API."""

    def __init__(self) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm

        self._torch_xla = torch_xla
        self._xm = xm
        self._device = torch_xla.device()

    def build(self, workload: str) -> Callable[[], Any]:
        """The step on the first device."""
        return workloads.build(workload, self._device)

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any] | None:
        """None: every step runs its Python."""
        return None

    def sync(self) -> None:
        """Hand the recorded step over to the device."""
        self._torch_xla.sync()

    def wait(self) -> None:
        """Wait for all devices."""
        self._xm.wait_device_ops()


class ThisProject(LazyXLA):
    """The packages of this repository."""

    def __init__(self) -> None:
        super().__init__()
        from torch_xla.experimental.capture import capture
        from xla_core.extension_api import programs

        self._capture = capture
        self._report = programs

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any] | None:
        """The step through ``torch_xla.experimental.capture``."""
        replayed, batches = self._capture(step.train), step.batches  # type: ignore[attr-defined]
        return lambda: replayed(*next(batches))

    def programs(self) -> int | None:
        """Programs in the core's own report."""
        return len(self._report.program_runs())

    def cached_programs(self) -> int | None:
        """Those the core's report marks."""
        return sum(program.from_cache for program in self._report.program_runs())

    def fallbacks(self) -> dict[str, int]:
        """The core's fallback counters."""
        counts = self._report.fallback_counts()
        return {name: count for name, count in counts.items() if name != READING_A_VALUE}

    def executable_seconds(self, repeats: int) -> float | None:
        """The last executable, run again and again on same-shaped buffers."""
        return self._report.replay_seconds(repeats)


class OfficialTorchXLA(LazyXLA):
    """The official torch_xla package."""

    def __init__(self) -> None:
        super().__init__()
        import torch_xla.debug.metrics as met

        self._met = met

    def programs(self) -> int | None:
        """Compilations and loads from its persistent cache."""
        names = ("UncachedCompile", "PersistentCacheHit")
        return sum(self._met.counter_value(name) or 0 for name in names)

    def cached_programs(self) -> int | None:
        """Loads from its persistent cache."""
        return self._met.counter_value("PersistentCacheHit") or 0

    def fallbacks(self) -> dict[str, int]:
        """Its ``aten::`` counters."""
        names = [name for name in self._met.counter_names() if name.startswith("aten::")]
        return {name: self._met.counter_value(name) for name in names if name != READING_A_VALUE}

    def executable_seconds(self, repeats: int) -> float | None:
        """None: it offers no way to run a program again on given buffers."""
        return None


class Jax(EagerCPU):
    """jax itself, one device, with its own persistent cache."""

    def __init__(self) -> None:
        import jax

        jax.config.update("jax_platforms", "cpu")
        folder = os.environ.get("XLA_PERSISTENT_CACHE_PATH")
        if folder:
            jax.config.update("jax_compilation_cache_dir", folder)
        self._last: Any = None

    def build(self, workload: str) -> Callable[[], Any]:
        """The jitted step."""
        import jax_gpt

        step = jax_gpt.build(workload)

        def remembered() -> Any:
            self._last = step()
            return self._last

        return remembered

    def wait(self) -> None:
        """Wait for the last step: it needs those before it."""
        if self._last is not None:
            self._last.block_until_ready()


SYSTEMS: dict[str, type[EagerCPU] | type[ThisProject] | type[OfficialTorchXLA]] = {
    "xla": ThisProject,
    "xla_inlined": ThisProject,
    "torch_xla": OfficialTorchXLA,
    "jax": Jax,
    "cpu": EagerCPU,
}
"""All systems by the name the command line uses, in the order of the table."""

ENVIRONMENTS: dict[str, dict[str, str]] = {"xla_inlined": {"XLA_OUTLINE_REPEATS": "0"}}
"""What is added to the environment of a system's processes."""
