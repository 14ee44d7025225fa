"""The names of ``torch_xla._internal.pjrt`` that test suites and libraries call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xla_core import model_api
from xla_dist import launching
from xla_dist.launching import run_multiprocess as run_multiprocess
from xla_dist.threads import run_threads


def spawn(
    fn: Callable[..., Any],
    nprocs: int | None = None,
    start_method: str = "spawn",
    args: Sequence[Any] = (),
) -> None:
    """``xmp.spawn`` with the arguments in another order; waits for the processes."""
    launching.spawn(fn, args, nprocs, start_method=start_method)


def spawn_threads(fn: Callable[..., Any], args: Sequence[Any] = ()) -> dict[int, Any]:
    """Run ``fn(ordinal, *args)`` in one thread per device of this process; the results by ordinal."""
    return dict(enumerate(run_threads(model_api.devices(), lambda ordinal: fn(ordinal, *args))))
