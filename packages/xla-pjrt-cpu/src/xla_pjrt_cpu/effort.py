"""How hard XLA's CPU compiler works for a program: as hard as the program is worth.

Optimized code takes XLA 40 ms for a few operations and seconds for a training step; the code of
``FAST`` a third to a tenth of that, but it computes 0.5 to 1.5 ns longer for each element of each
operation. ``MEDIUM`` lies between, where there are few matrix products: its fusions are compiled one
operand at a time, which makes large ones dear. Measured on two cores (jaxlib 0.10.2, AVX-512; CPU time to
compile in ms, and one run in ms; cost as ``WEIGHTS`` has it):

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

Which of them a program gets depends on the program alone, not on how often it was seen: the same step
gives the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from xla_core.contract.device_protocol import Program
from xla_core.pjrt.cpu_runtime import Module, Options, Weights, estimate
from xla_core.support import flags

_LEVEL: Final = "xla_backend_optimization_level"
_EMITTERS: Final = "xla_cpu_use_fusion_emitters"
_SPLIT: Final = "xla_cpu_parallel_codegen_split_count"
# XLA's own options (jaxlib 0.10.2). In one piece: each piece repeats what the pieces share.
OPTIONS: Final[Mapping[str, Options]] = {
    "fast": {_LEVEL: 0, _EMITTERS: False, _SPLIT: 1},
    "medium": {_LEVEL: 1, _EMITTERS: False, _SPLIT: 1},
    "full": {},
}

WEIGHTS: Final = Weights(transcendental=16, indexed=6, comparison=40, flop=1 / 64)
"""What optimization saves: an element takes 0.5 ns longer, one of ``tanh`` 9, a comparison 20."""
FAST_MOST: Final = 1 << 18
"""About 0.15 ms longer than optimized."""
FAST_BASE, FAST_EACH = 1 << 15, 512
"""Few operations are compiled soon: that much cost, and that much for each operation, are fast."""
MEDIUM_MOST: Final = 1 << 20
"""About 0.05 ms longer than optimized."""
RULE: Final = f"{OPTIONS} {WEIGHTS} {FAST_MOST} {FAST_BASE} {FAST_EACH} {MEDIUM_MOST} 1"
"""Part of the persistent cache's key; the number at its end is raised when the estimate changes."""


def effort_for(program: Program, module: Module | None) -> str:
    """``fast``, ``medium`` or ``full``; ``XLA_COMPILE_EFFORT`` decides before the program does.

    ``module`` is the program's, None where it is not readable.
    """
    chosen = flags.COMPILE_EFFORT.get()
    if chosen != "auto":
        return chosen
    work = estimate(module, WEIGHTS, MEDIUM_MOST / program.runs)
    if work is None:
        return "full"
    cost, operations = work.cost * program.runs, work.operations * program.runs
    return "fast" if cost <= min(FAST_MOST, FAST_BASE + FAST_EACH * operations) else "medium"


def options_by_effort(
    program: Program, module: Module | None, xla_flags: str
) -> dict[str, str | int | float | bool]:
    """Compiler options for a program, without those that ``XLA_FLAGS`` has already."""
    options = OPTIONS[effort_for(program, module)]
    return {name: value for name, value in options.items() if name not in xla_flags}


def effort_rule() -> str:
    """What decides beside the program, as part of the persistent cache's key."""
    return f"{flags.COMPILE_EFFORT.get()} {RULE}"
