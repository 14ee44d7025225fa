"""Runs a script as it is, and sees FLOPs of its steps and the memory of its optimizers meanwhile."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from xla_core.contract import events
from xla_plan.steps.chip_memory import bytes_by_kind
from xla_plan.steps.step_flops import Flops, recorded_flops


class Watch:
    """``flops`` are those of steps, by the names of their programs; ``parts`` bytes on the first chip by kind."""

    def __init__(self) -> None:
        self.flops: dict[str, Flops] = {}
        self._parts: dict[int, dict[str, int]] = {}

    @property
    def parts(self) -> dict[str, int]:
        """Those of all optimizers that stepped, with the state that they had before their last step."""
        total: Counter[str] = Counter()
        for parts in self._parts.values():
            total.update(parts)
        return dict(total)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A context that runs steps."""
        unsubscribe = events.subscribe(events.ProgramExecuted, self._executed)
        hook = register_optimizer_step_pre_hook(self._steps)
        try:
            yield
        finally:
            unsubscribe()
            hook.remove()

    def _executed(self, event: events.ProgramExecuted) -> None:
        name = event.program.name
        if name not in self.flops:
            self.flops[name] = recorded_flops(event.trace.cur.path())

    def _steps(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._parts[id(optimizer)] = bytes_by_kind(parameters, (), optimizer)


def run_script(path: str, arguments: Sequence[str]) -> Watch:
    """Run a script as ``python script`` does; ``sys.exit`` ends it without an error."""
    watch = Watch()
    former = sys.argv, list(sys.path)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        with contextlib.suppress(SystemExit), watch.watching():
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = former
    return watch
