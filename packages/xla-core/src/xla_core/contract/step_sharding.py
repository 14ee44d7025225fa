"""A recorded step, and the sharding chosen for its inputs: see the hook ``xla_core_choose_shardings``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from xla_core.contract.device_protocol import Executable

__all__ = [
    "Axes",
    "DATA",
    "OTHER",
    "PARAMETER",
    "PartitionSpec",
    "STATE",
    "ShardingChoice",
    "StepInput",
    "StepToSplit",
]

PARAMETER = "parameter"
"""The role of an input that is a parameter of a module, or another leaf that needs a gradient."""
STATE = "state"
"""The role of an input that the step replaces and that is not a parameter, such as an optimizer's state."""
DATA = "data"
"""The role of an input that belongs to no module and is not replaced, such as a batch of data."""
OTHER = "other"
"""The role of all other inputs: buffers of modules, scalars."""

Axes = tuple[tuple[str, int], ...]
"""A mesh over all devices: the names of its axes with their sizes."""
PartitionSpec = tuple[str | tuple[str, ...] | None, ...]
"""The partition spec of a value: for each dimension the mesh axis or axes that split it; None: not split."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepInput:
    """A value that the step takes from memory.

    ``name`` is the user's (``model.fc.weight``) or a number, ``role`` what the step does with it, ``shape`` the
    whole value's, ``itemsize`` bytes per element. ``annotated``: the user said how it is split.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    itemsize: int
    annotated: bool = False


class StepToSplit(Protocol):
    """A step that was recorded for ``devices`` devices as one.

    ``flops`` are the multiplications and additions of its products, of all devices together. ``kind`` is the
    hardware's name, ``limit`` the bytes that programs may use on one device, None if unknown.
    """

    inputs: Sequence[StepInput]
    flops: float
    devices: int
    kind: str
    limit: int | None

    def compiled(self, axes: Axes, specs: Sequence[PartitionSpec | None]) -> Executable:
        """Compile the step with its inputs split this way (None: unsharded). Raises the compiler's RuntimeError."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ShardingChoice:
    """``specs`` has one partition spec per input, over a mesh of ``axes`` (None: as is); ``report`` says why."""

    axes: Axes
    specs: Sequence[PartitionSpec | None]
    report: str
