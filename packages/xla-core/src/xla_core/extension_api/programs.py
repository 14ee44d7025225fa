"""Compiled programs: what ran, what the compiler says of it, the persistent cache, and texts."""

from __future__ import annotations

from xla_core.api.hlo_text_names import node_text, shape_text
from xla_core.api.program_report import (
    ProgramFigures,
    ProgramRuns,
    fallback_counts,
    program_figures,
    program_runs,
    replay_seconds,
)
from xla_core.compilation.build_program import compile_program
from xla_core.compilation.disk_cache import (
    CacheEntry,
    CacheRefusedError,
    PersistentCache,
)
from xla_core.compilation.disk_cache import entries as cache_entries
from xla_core.compilation.program_table import StepProgram, all_programs
from xla_core.jax_bridge.jax_private import hlo_text, module_text
from xla_core.lowering.step_program import lower as lower_step
from xla_core.varying.families import kept_out as kept_from_varying

__all__ = [
    "CacheEntry",
    "CacheRefusedError",
    "PersistentCache",
    "ProgramFigures",
    "ProgramRuns",
    "StepProgram",
    "all_programs",
    "cache_entries",
    "compile_program",
    "fallback_counts",
    "hlo_text",
    "kept_from_varying",
    "lower_step",
    "module_text",
    "node_text",
    "program_figures",
    "program_runs",
    "replay_seconds",
    "shape_text",
]
