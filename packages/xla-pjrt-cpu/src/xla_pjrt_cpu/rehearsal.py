"""Decides which programs may run on zeros before their first use.

XLA's CPU runtime sets up each fusion when it first runs, which takes 0.3 to 1 ms on one thread: most of the first
step of a program that was loaded from the cache.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Final

from xla_core.contract.device_protocol import ArraySpec, Buffer, Placement, Program
from xla_core.contract.foreign_values import ForeignObject
from xla_core.pjrt.executable import PjrtExecutable
from xla_core.pjrt.rehearsal_safety import only_computes

logger = logging.getLogger(__name__)

MOST_BYTES: Final = 64 << 20
"""The largest size of a rehearsed program's arguments, results and temporaries together."""
MOST_FLOPS: Final = 1e9
"""The largest work of a rehearsed program, about 20 ms: a late rehearsal competes with the first real run."""
_MARK: Final = "rehearsable"


class CpuExecutable(PjrtExecutable):
    """A program on one device; when it is serialized, it also stores whether it may be rehearsed."""

    __slots__ = ("rehearsable",)

    rehearsable: bool | None
    """Whether it may be rehearsed; None until that has been examined."""

    def __init__(self, *args: ForeignObject) -> None:
        super().__init__(*args)
        self.rehearsable = None

    def arguments(self, allocate: Callable[[ArraySpec, Placement], Buffer]) -> list[Buffer]:
        """Buffers of zeros for one run; ``allocate`` creates a buffer."""
        program = self.program
        donated = {slot for slot, _ in program.aliases}
        # One buffer serves for all arguments of a shape and dtype that are not donated: each allocation takes the
        # interpreter's lock, for which the script competes.
        shared = functools.cache(lambda spec: allocate(spec, program.placement))
        return [
            allocate(spec, program.placement) if slot in donated else shared(spec)
            for slot, spec in enumerate(program.inputs)
        ]

    def stored_report(self) -> Mapping[str, object]:
        """A report for the serialized program: whether it may be rehearsed. The first call examines the program."""
        if self.rehearsable is None:
            try:
                self.rehearsable = self._harmless() and self._small()
            except (
                RuntimeError
            ) as error:  # the compiler has no such analysis; the program is stored anyway
                logger.debug("%s is not rehearsed: %s", self.program_name, error)
                self.rehearsable = False
        return {_MARK: self.rehearsable}

    def _harmless(self) -> bool:
        return only_computes(self.program.stablehlo, self.optimized_hlo)

    def _small(self) -> bool:
        if _argument_bytes(self.program) > MOST_BYTES:
            return False  # the figures below take as long to compute as serializing does
        figures = self.memory_analysis()
        used = sum(figures[use] for use in ("arguments", "outputs", "temporaries"))
        return used <= MOST_BYTES and self.cost_analysis().get("flops", 0.0) <= MOST_FLOPS


def stored_as_rehearsable(report: Mapping[str, object] | None) -> bool:
    """Whether the report of a serialized program says that it may be rehearsed; older programs have no report."""
    return report is not None and report.get(_MARK) is True


def _argument_bytes(program: Program) -> int:
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in program.inputs)
