"""What ``use_spmd(auto=True)`` decided, to be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from xla_core.contract.step_sharding import Axes, PartitionSpec
from xla_core.extension_api import runtime
from xla_spmd.tensors.marking import mesh_backend


@dataclasses.dataclass(frozen=True, slots=True)
class AutomaticSharding:
    """A decision: the mesh's axes with their sizes, a partition spec by name, and the reasons as text.

    ``specs`` has every input of the step that decided and that is split or held whole by decision; names are those
    of parameters in their model, and of what the optimizer keeps for them.
    """

    axes: Axes
    specs: Mapping[str, PartitionSpec]
    report: str

    def __str__(self) -> str:
        return self.report


def automatic_sharding() -> AutomaticSharding | None:
    """What was decided last; None before the first step that decides. Raises RuntimeError outside SPMD mode."""
    backend = mesh_backend(runtime.trace_of(None))
    decided = backend.automatic
    if decided.choice is None:
        return None
    pairs = zip(decided.names, decided.choice.specs, strict=True)
    specs = {name: spec for name, spec in pairs if spec is not None}
    return AutomaticSharding(decided.choice.axes, specs, decided.choice.report)
