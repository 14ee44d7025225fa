"""Helpers for code that uses jax itself beside ``xla`` tensors.

A TPU belongs to the first client of the process, which must be this project's own. So these functions start it
before they return jax, which starts its own backends when they are first used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Final, ParamSpec, TypeVar

import jax

from xla_core.execution import runtime

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Otherwise libtpu starts a client of its own for slices that are connected by the data center's network.
_SKIP_VARIABLE: Final = "SKIP_MEGASCALE_PJRT_CLIENT"


class _Blocks:
    """The blocks of ``jax_env_context`` that are open, in all threads, and the variable's value outside of them."""

    lock = threading.Lock()
    count = 0
    former: str | None = None


def jax_import_guard() -> None:
    """Start this process's device client, so that jax does not take the device first."""
    runtime.client()


def maybe_get_jax(log: bool = True) -> ModuleType:
    """Call ``jax_import_guard()`` and return the module ``jax``; ``log`` is accepted and has no effect."""
    del log
    jax_import_guard()
    return jax


def maybe_get_torchax() -> ModuleType | None:
    """Call ``jax_import_guard()`` and return the module ``torchax``, or None if it is not installed."""
    jax_import_guard()
    if importlib.util.find_spec("torchax") is None:
        return None
    with jax_env_context():
        return importlib.import_module("torchax")


@contextlib.contextmanager
def jax_env_context() -> Iterator[None]:
    """Keep libtpu from starting its client for connected slices while jax is used inside the block.

    It sets an environment variable, which the last of several blocks that are open at once restores.
    """
    with _Blocks.lock:
        if not _Blocks.count:
            _Blocks.former = os.environ.get(_SKIP_VARIABLE)
            os.environ[_SKIP_VARIABLE] = "true"
        _Blocks.count += 1
    try:
        yield
    finally:
        with _Blocks.lock:
            _Blocks.count -= 1
            if not _Blocks.count:
                os.environ.pop(_SKIP_VARIABLE, None)
                if _Blocks.former is not None:
                    os.environ[_SKIP_VARIABLE] = _Blocks.former


def requires_jax(func: Callable[_P, _R]) -> Callable[_P, _R]:
    """A decorator for functions that use jax: the device client is started before they run."""

    @functools.wraps(func)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        jax_import_guard()
        with jax_env_context():
            return func(*args, **kwargs)

    return call
