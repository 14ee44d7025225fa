"""The hooks of this package, which xla-core calls."""

from __future__ import annotations

from xla_core.contract.hookspecs import hookimpl
from xla_core.contract.step_sharding import ShardingChoice, StepToSplit
from xla_plan.planning import automatic


@hookimpl
def xla_core_choose_shardings(step: StepToSplit) -> ShardingChoice:
    """The best of the meshes and splits that are tried."""
    return automatic.choose(step)
