"""The choice that ``use_spmd(auto=True)`` made, for the user to read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from xla_core.contract.step_sharding import Axes, PartitionSpec
from xla_core.extension_api import runtime
from xla_spmd.tensors.marking import mesh_backend


@dataclasses.dataclass(frozen=True, slots=True)
class AutomaticSharding:
    """An automatic choice of shardings.

    ``axes`` are the mesh's axes with their sizes. ``specs`` has the partition specs by name, for each input of the
    examined step for which one was chosen. The names are those of parameters in their model, and of the optimizer's
    state for them. ``report`` is a text with the reasons.
    """

    axes: Axes
    specs: Mapping[str, PartitionSpec]
    report: str

    def __str__(self) -> str:
        return self.report


def automatic_sharding() -> AutomaticSharding | None:
    """The last automatic choice, or None before the first one. Raises RuntimeError outside SPMD mode."""
    automatic = mesh_backend(runtime.trace_of(None)).automatic
    if automatic.choice is None:
        return None
    pairs = zip(automatic.names, automatic.choice.specs, strict=True)
    specs = {name: spec for name, spec in pairs if spec is not None}
    return AutomaticSharding(automatic.choice.axes, specs, automatic.choice.report)
