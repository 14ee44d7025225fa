"""What a random program may consist of: functions that make one instruction for a generator.

Each looks at the tensors that are there and returns an instruction that suits one of them, or
None. ``FAMILIES`` groups them, ``WEIGHTS`` says how often each group is drawn.
"""

from __future__ import annotations

from typing import Final

from xla_core.testing.program_parts import autograd, lifetimes, new_values, views, writes
from xla_core.testing.program_parts.choices import Maker

FAMILIES: Final[tuple[tuple[Maker, ...], ...]] = (
    new_values.NEW,
    new_values.COMBINED,
    views.COMMON,
    views.RARE,
    writes.COMMON,
    writes.RARE,
    autograd.GRADIENTS,
    lifetimes.SHARED,
    lifetimes.NAMES,
    lifetimes.STEPS,
)
WEIGHTS: Final = (12, 8, 12, 8, 20, 14, 12, 4, 7, 3)
