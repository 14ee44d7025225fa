"""What tests of other packages look at, and no extension may: it changes whenever the core does.

Tests of plugins and extensions import ``contract``, ``extension_api`` and ``pjrt``, as their packages do, and
the modules of this folder. What they need besides is collected here, so that one sees how much it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from xla_core.compilation.build_program import key_text
from xla_core.compilation.disk_cache import PersistentCache
from xla_core.dispatch import index_ranges
from xla_core.execution import index_checks
from xla_core.execution.device_backend import keep_numbers
from xla_core.kernels import flash_attention, grouped_matmul, paged_attention, splash_attention
from xla_core.lowering.outline_functions import KEPT_PREFIX
from xla_core.multiprocess.job_setup import free_port
from xla_core.operators import lowering_registry
from xla_core.operators.target import lowering_for, target_of
from xla_core.recording import xla_tensor
from xla_core.recording.entry import Root
from xla_core.support.memory_mappings import count as count_memory_mappings

__all__ = [
    "KEPT_PREFIX",
    "PersistentCache",
    "Root",
    "checking_indices",
    "count_memory_mappings",
    "flash_attention",
    "free_port",
    "grouped_matmul",
    "keep_numbers",
    "key_text",
    "lowering_for",
    "new_handlers",
    "paged_attention",
    "replacing_rule",
    "splash_attention",
    "target_of",
]


@contextlib.contextmanager
def new_handlers() -> Iterator[None]:
    """Within the block operators' handlers are made anew, as at their first use; then the former ones are back."""
    former = xla_tensor.go_on_with_handlers({})
    try:
        yield
    finally:
        xla_tensor.go_on_with_handlers(former)


@contextlib.contextmanager
def checking_indices() -> Iterator[None]:
    """Within the block ``XLA_CHECK_INDICES``, set before, counts as if set at the start."""
    index_ranges.install()
    try:
        with new_handlers():
            yield
    finally:
        index_checks.pending.clear()


@contextlib.contextmanager
def replacing_rule(overload: object, function: Callable[..., object]) -> Iterator[None]:
    """Within the block ``function`` computes ``overload`` in programs, in place of its lowering rule's function."""
    rules = lowering_registry._rules
    rule = rules[overload]
    rules[overload] = dataclasses.replace(rule, function=function)
    try:
        with new_handlers():
            yield
    finally:
        rules[overload] = rule
