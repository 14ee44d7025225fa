"""What tests, benchmarks and tools look at, and no extension may: it changes whenever the core does.

They import ``contract``, ``extension_api`` and ``pjrt``, as extensions do, and the modules of this folder. What
they need in addition is collected here, so that one sees how much it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from torch._ops import OpOverload

from xla_core.capture.captured import Captured
from xla_core.capture.replay import Replay
from xla_core.compilation import disk_cache
from xla_core.compilation.build_program import key_text
from xla_core.compilation.disk_cache import PersistentCache
from xla_core.compilation.memory_mappings import count as count_memory_mappings
from xla_core.dispatch import index_ranges
from xla_core.dispatch.resolve import make_handler
from xla_core.execution import index_checks
from xla_core.execution.device_backend import keep_numbers
from xla_core.kernels import flash_attention, grouped_matmul, paged_attention, splash_attention
from xla_core.lowering.outline_functions import KEPT_PREFIX
from xla_core.multiprocess.job_setup import free_port
from xla_core.operators import lowering_registry
from xla_core.operators.schema import pure_form
from xla_core.operators.target import lowering_for, target_of
from xla_core.recording import trace, xla_tensor
from xla_core.recording.entry import Root
from xla_core.support import counters
from xla_core.torch_bridge.torch_private import release_free_memory
from xla_core.varying import families

__all__ = [
    "CACHE_ENTRY_MAGIC",
    "CACHE_ENTRY_SUFFIX",
    "KEPT_PREFIX",
    "PersistentCache",
    "Root",
    "checking_indices",
    "count_memory_mappings",
    "exchange_followers",
    "flash_attention",
    "free_port",
    "grouped_matmul",
    "keep_numbers",
    "keeping_the_cache",
    "key_text",
    "lowering_for",
    "limit_remembered_entries",
    "limit_varying_steps",
    "make_handler",
    "new_handlers",
    "overloads_with_rules",
    "paged_attention",
    "pure_form",
    "release_free_memory",
    "replays_of",
    "replacing_rule",
    "splash_attention",
    "target_of",
]

CACHE_ENTRY_MAGIC = disk_cache._MAGIC
"""The bytes that each entry of the persistent cache begins with."""
CACHE_ENTRY_SUFFIX = disk_cache.SUFFIX
"""The end of the file name of each entry of the persistent cache."""


def replays_of(captured: Captured) -> list[Replay]:
    """What a captured function replays: one for each kind of arguments that it has recorded."""
    return [one for one in captured._known.values() if isinstance(one, Replay)]


def exchange_followers(followers: list[counters.Follower]) -> list[counters.Follower]:
    """Let only ``followers`` hear what is counted from now on; the functions that heard it before.

    Unlike ``counters.follow`` it tells them nothing of what was counted before.
    """
    with counters.lock:
        former = list(counters._followers)
        counters._followers[:] = followers
    return former


def overloads_with_rules() -> list[OpOverload]:
    """Every operator overload that has a rule: of an operation, of a view, or of a result whose size is fetched."""
    registry = lowering_registry
    return [*registry._rules, *registry._views, *registry._multi_views, *registry._inspected]


@contextlib.contextmanager
def keeping_the_cache() -> Iterator[None]:
    """Within the block another persistent cache may be chosen; then the process's own is in use again."""
    in_use = disk_cache._InUse
    former = in_use.cache, in_use.decided
    try:
        yield
    finally:
        in_use.cache, in_use.decided = former


@contextlib.contextmanager
def new_handlers() -> Iterator[None]:
    """A block in which operators' handlers are made again, as at their first use; it ends with the former ones."""
    former = xla_tensor.go_on_with_handlers({})
    try:
        yield
    finally:
        xla_tensor.go_on_with_handlers(former)


def limit_varying_steps(most: int) -> None:
    """From now on keep at most ``most`` kinds of steps whose sizes vary (default: 256)."""
    families._families.limit(most)


def limit_remembered_entries(most: int) -> int:
    """From now on a device's trace forgets all its steps when they have more than ``most`` entries.

    Returns:
        The limit before.
    """
    former, trace.MAX_ENTRIES = trace.MAX_ENTRIES, most
    return former


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
def replacing_rule(overload: OpOverload, function: Callable[..., object]) -> Iterator[None]:
    """Within the block ``function`` computes ``overload`` in programs, in place of its lowering rule's function."""
    rules = lowering_registry._rules
    rule = rules[overload]
    rules[overload] = dataclasses.replace(rule, function=function)
    try:
        with new_handlers():
            yield
    finally:
        rules[overload] = rule
