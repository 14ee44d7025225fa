"""A program for all lengths up to a bound, compiled without being run: for devices that are not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np

import torch_xla
from xla_core.compilation.program_identity import ProgramIdentity
from xla_core.contract.device_protocol import Executable
from xla_core.recording.trace import Trace
from xla_core.testing.against_cpu import forget_pending
from xla_core.testing.lengths.programs import NotServedError, only_served
from xla_core.varying import bound_program, families, skeletons
from xla_core.varying.bound_program import BoundProgram, Range
from xla_core.varying.fit import fit


def compiled_for(
    record: Callable[[int], object], lengths: Sequence[int], between: Range
) -> Executable:
    """The executable for all lengths ``between`` two bounds of the step that ``record(length)`` records.

    It is fitted to ``lengths``. Raises ValueError where they tell nothing, NotCoveredError where it is kept out.
    """
    samples: list[np.ndarray] = []
    programs: list[BoundProgram] = []

    def look(trace: Trace, key: ProgramIdentity) -> None:
        wiped = skeletons.wiped(trace.cur.path())
        samples.append(np.array(wiped.numbers, dtype=np.int64))
        if len(samples) < len(lengths):
            return
        fitted = fit(samples, wiped.sizes)
        if fitted is None:
            raise ValueError(lengths)
        step = families.recorded(trace, key)
        room = (0,) * len(fitted.lengths)
        programs.append(
            bound_program.build(
                step, fitted, wiped.sizes, between, "varying", room, len(wiped.flags)
            )
        )

    with mock.patch.object(families, "serve", look), only_served():
        for length in lengths:
            record(length)
            try:
                torch_xla.sync()
            except NotServedError:
                forget_pending()
    return programs[-1].executable
