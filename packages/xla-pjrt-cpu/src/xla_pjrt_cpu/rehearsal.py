"""Which programs may be run on zeros ahead of their first use.

XLA's CPU runtime sets up each fusion when it first runs: 0.3 to 1 ms each, on one thread, which is
most of the first step of a program that was loaded instead of compiled.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from xla_core.contract.device_protocol import ArraySpec, Placement, Program
from xla_core.pjrt.executable import PjrtExecutable
from xla_core.pjrt.rehearsal_safety import only_computes

logger = logging.getLogger(__name__)

MOST_BYTES: Final = 64 << 20
"""Arguments, results and temporaries of a rehearsed program."""
MOST_FLOPS: Final = 1e9
"""About 20 ms: where a rehearsal comes too late, the first real run competes with this much work."""
_MARK: Final = "rehearsable"


class CpuExecutable(PjrtExecutable):
    """A program on one device, which stores with itself whether it may be rehearsed."""

    __slots__ = ("rehearsable",)

    rehearsable: bool | None
    """None: unknown, because it has not been examined since it was compiled."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rehearsable = None

    def arguments(self, allocate: Callable[[ArraySpec, Placement], Any]) -> list[Any]:
        """Zeros for one run; ``allocate`` makes a buffer of them."""
        program = self.program
        donated = {slot for slot, _ in program.aliases}
        # what a run leaves alone may be given twice: the interpreter's lock, which each allocation
        # takes, is wanted by the script
        shared = functools.cache(lambda spec: allocate(spec, program.placement))
        return [
            allocate(spec, program.placement) if slot in donated else shared(spec)
            for slot, spec in enumerate(program.inputs)
        ]

    def stored_report(self) -> Mapping[str, object]:
        """Whether it may be rehearsed; the first call finds out."""
        if self.rehearsable is None:
            try:
                self.rehearsable = self._harmless() and self._small()
            except RuntimeError as error:  # whatever the compiler cannot tell: storing goes on
                logger.debug("%s is not rehearsed: %s", self.program_name, error)
                self.rehearsable = False
        return {_MARK: self.rehearsable}

    def _harmless(self) -> bool:
        return only_computes(self.program.stablehlo, self.optimized_hlo)

    def _small(self) -> bool:
        if _argument_bytes(self.program) > MOST_BYTES:
            return False  # without the other figures, which take as long as serializing
        figures = self.memory_analysis()
        used = sum(figures[use] for use in ("arguments", "outputs", "temporaries"))
        return used <= MOST_BYTES and self.cost_analysis().get("flops", 0.0) <= MOST_FLOPS


def noted(report: Mapping[str, object] | None) -> bool:
    """Whether a stored program's report says that it may be rehearsed; those of old say nothing."""
    return report is not None and report.get(_MARK) is True


def _argument_bytes(program: Program) -> int:
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in program.inputs)
