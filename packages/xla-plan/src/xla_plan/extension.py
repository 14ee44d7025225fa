"""The hooks of this package, which xla-core calls."""

from __future__ import annotations

import importlib

from xla_core.contract.hookspecs import hookimpl
from xla_core.contract.step_sharding import ShardingChoice, StepToSplit


@hookimpl
def xla_core_choose_shardings(step: StepToSplit) -> ShardingChoice:
    """The best of the meshes and splits that are tried."""
    # imported where it is needed: every process with an xla device imports this module
    choice: ShardingChoice = importlib.import_module("xla_plan.planning.automatic").choose(step)
    return choice
