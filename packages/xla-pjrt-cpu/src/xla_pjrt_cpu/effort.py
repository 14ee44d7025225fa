"""Chooses the optimization effort of XLA's CPU compiler by the work of the program.

To generate optimized code, XLA takes 40 ms for a few operations and seconds for a training step. The effort
``fast`` takes a third to a tenth of that, but its code takes 0.5 to 1.5 ns longer for each element of each
operation. ``medium`` is between the two for programs with few matrix products; it computes the operands of a fusion
one by one, which makes large fusions slow. Measured on two cores (jaxlib 0.10.2, AVX-512; processor time to compile
in ms and one run in ms; the cost is that of ``WEIGHTS``):

| one training step of | cost | full | medium | fast |
|---|---|---|---|---|
| an encoder layer, width 16, Adam | 0.1 M | 1633, 0.27 | 769, 0.26 | 168, 0.35 |
| a four-layer MLP, width 32, Adam | 0.1 M | 328, 0.19 | 255, 0.20 | 54, 0.25 |
| an LSTM over 4 steps, width 32 | 0.2 M | 898, 0.22 | 429, 0.24 | 103, 0.24 |
| a loop of slices and updates | 0.3 M | 2098, 0.11 | 780, 0.14 | 131, 0.61 |
| an encoder layer, width 64 | 0.7 M | 1138, 0.36 | 729, 0.38 | 118, 0.73 |
| a CNN with batch norm, width 16, Adam | 0.7 M | 1253, 0.92 | 659, 0.94 | 127, 1.42 |
| an MLP of eight layers, width 128, Adam | 4 M | 624, 1.25 | 937, 1.52 | 145, 3.34 |
| a GPT of 12 layers, width 64, AdamW | 35 M | 3612, 11.5 | 14560, 20.1 | 2539, 38.0 |

The effort depends only on the program, not on how often it has run, so that the same step gives the same bits in
each run of a script.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final

from xla_core.contract.device_protocol import Program
from xla_core.pjrt.cpu_runtime import Module, Options, Weights, estimate
from xla_core.support import flags

_LEVEL: Final = "xla_backend_optimization_level"
_EMITTERS: Final = "xla_cpu_use_fusion_emitters"
_SPLIT: Final = "xla_cpu_parallel_codegen_split_count"
# XLA's own options (jaxlib 0.10.2). Code is generated in one part (``_SPLIT``): each part would repeat shared code.
OPTIONS: Final[Mapping[str, Options]] = {
    "fast": {_LEVEL: 0, _EMITTERS: False, _SPLIT: 1},
    "medium": {_LEVEL: 1, _EMITTERS: False, _SPLIT: 1},
    "full": {},
}

WEIGHTS: Final = Weights(transcendental=16, indexed=6, comparison=40, flop=1 / 64)
"""The time that optimization saves for each element.

For most it is 0.5 ns, the unit; for ``tanh`` 9 ns, for a comparison 20 ns.
"""
FAST_MOST: Final = 1 << 18
"""The largest cost for ``fast``: a run takes about 0.15 ms longer than with ``full``."""
FAST_BASE, FAST_EACH = 1 << 15, 512
"""A program of few operations compiles soon even with ``full``.

The cost for ``fast`` is at most this base, plus this much for each operation.
"""
MEDIUM_MOST: Final = 1 << 20
"""The largest cost for ``medium``: a run takes about 0.05 ms longer than with ``full``."""
RULE: Final = f"{OPTIONS} {WEIGHTS} {FAST_MOST} {FAST_BASE} {FAST_EACH} {MEDIUM_MOST} 1"
"""A part of the persistent cache's key. Raise the number at its end when the estimate changes."""


def effort_for(program: Program, module: Module | None) -> str:
    """The effort for a program: ``fast``, ``medium`` or ``full``. ``XLA_COMPILE_EFFORT`` overrides the choice.

    ``module`` is the program's module, None if it cannot be read.
    """
    effort = flags.COMPILE_EFFORT.get()
    if effort != "auto":
        return effort
    work = estimate(module, WEIGHTS, MEDIUM_MOST / program.runs)
    if work is None:
        return "full"
    cost, operations = work.cost * program.runs, work.operations * program.runs
    return "fast" if cost <= min(FAST_MOST, FAST_BASE + FAST_EACH * operations) else "medium"


def options_by_effort(
    program: Program, module: Module | None, of_user: Container[str]
) -> dict[str, str | int | float | bool]:
    """The compiler options of the program's effort, except the flags ``of_user``."""
    options = OPTIONS[effort_for(program, module)]
    return {name: value for name, value in options.items() if name not in of_user}


def effort_rule() -> str:
    """The setting and the rule that determine a program's effort, as a part of the persistent cache's key."""
    return f"{flags.COMPILE_EFFORT.get()} {RULE}"
