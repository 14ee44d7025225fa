"""The records of ``xla-debug run``: steps, the runs in them, and the lines that made the host wait."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Sequence
from typing import Final

from xla_core.extension_api.source_location import Frame
from xla_core.extension_api.steps import Entry
from xla_debug.stacks.sync_causes import SyncCause
from xla_debug.steps.repetitions import longest_loop

PARTS: Final = ("tracing", "sync", "compile", "execute", "transfer", "data")
"""The parts of a step: Python, preparing a run, compiling, waiting for results, copying, waiting for data."""


class What(enum.Enum):
    """Why the host waited at a line."""

    VALUE = "value read"
    PRINT = "value printed"
    CONDITION = "value in a condition"
    SIZE = "size read"
    FALLBACK = "operator on the CPU"


@dataclasses.dataclass(frozen=True)
class Loop:
    """A line that a compiled step repeats: the number of rounds, their operations, and their share of the step."""

    line: Frame
    rounds: int
    operations: int
    share: float


@dataclasses.dataclass
class Run:
    """One run of pending operations: the line and the cause that made them run, and their number.

    ``nanoseconds`` is the time of the whole run. ``optimizer`` counts the optimizers' steps in it by line. If a
    program was compiled, ``program`` is its name, ``compiling`` are the nanoseconds that it took, and ``loop`` is
    its longest loop.
    """

    asked_at: Frame | None
    cause: SyncCause
    operations: int
    nanoseconds: int = 0
    compiling: int = 0
    optimizer: Counter[Frame] = dataclasses.field(default_factory=Counter)
    program: str = ""
    loop: Loop | None = None

    @property
    def holds_several(self) -> bool:
        """Whether it contains several steps of one optimizer, because the script did not end the first."""
        return max(self.optimizer.values(), default=0) > 1


@dataclasses.dataclass
class Step:
    """One step: nanoseconds by part, its runs and compilations, and the device's memory at its end.

    ``compilations`` are indices of explanations, ``sent`` and ``received`` are bytes. ``ended`` is the line that
    ended the step, or None for operations that remained at the end of the script.
    """

    number: int
    wall: int = 0
    parts: Counter[str] = dataclasses.field(default_factory=Counter)
    operations: int = 0
    compilations: list[int] = dataclasses.field(default_factory=list)
    sent: int = 0
    received: int = 0
    memory: int | None = None
    runs: list[Run] = dataclasses.field(default_factory=list)
    ended: Frame | None = None

    def close(self, wall: int) -> None:
        """Set the wall time, and count what no other part accounts for as time of Python."""
        self.wall = wall
        accounted = sum(self.parts.values())
        self.parts["tracing"] = max(0, wall - accounted)


@dataclasses.dataclass
class Spot:
    """A line that made the host wait: how often, for how many nanoseconds, and how often it cut a step in two.

    ``operator`` is the operator that ran on the CPU, or whose result's size was read; it is empty for values.
    """

    what: What
    operator: str
    frame: Frame | None
    count: int = 0
    nanoseconds: int = 0
    cuts: int = 0

    @property
    def label(self) -> str:
        """The text for tables."""
        if self.what is What.FALLBACK:
            return self.operator
        return f"{self.what.value} ({self.operator})" if self.operator else self.what.value


@dataclasses.dataclass
class Sent:
    """A value that a line sends to the device ``count`` times; ``nanoseconds`` is the time of all but the first."""

    frame: Frame | None
    nbytes: int
    count: int = 0
    nanoseconds: int = 0


@dataclasses.dataclass(frozen=True)
class Survivor:
    """Values that a line created in one step and that are alive many steps later: their bytes and their number."""

    frame: Frame
    nbytes: int
    values: int


def loop_of(entries: Sequence[Entry]) -> Loop | None:
    """The longest loop of a step; None if no lines are known."""
    longest = longest_loop(entries)
    if longest is None:
        return None
    spot, rounds, operations = longest
    return Loop(spot.frames[0], rounds, operations, operations / len(entries))
