"""For code that uses jax itself beside ``xla`` tensors: who gets the device.

A TPU belongs to the first client of the process. This project's own client must be that one, so these
functions start it before they return jax; jax starts its own backends when they are used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

import jax

from xla_core.execution import runtime

# libtpu starts a client of its own for slices that are connected by the data center's network
_SKIP_VARIABLE: Final = "SKIP_MEGASCALE_PJRT_CLIENT"


def jax_import_guard() -> None:
    """Start this process's device client, so that jax does not take the device first."""
    runtime.client()


def maybe_get_jax(log: bool = True) -> ModuleType:
    """The module ``jax``, which is always installed here, after ``jax_import_guard()``.

    ``log`` is accepted: there is nothing to log.
    """
    del log
    jax_import_guard()
    return jax


def maybe_get_torchax() -> ModuleType | None:
    """The module ``torchax`` after ``jax_import_guard()``, None where it is not installed."""
    jax_import_guard()
    if importlib.util.find_spec("torchax") is None:
        return None
    with jax_env_context():
        return importlib.import_module("torchax")


@contextlib.contextmanager
def jax_env_context() -> Iterator[None]:
    """Keep libtpu from starting its client for connected slices while jax is used inside the block."""
    former = os.environ.get(_SKIP_VARIABLE)
    os.environ[_SKIP_VARIABLE] = "true"
    try:
        yield
    finally:
        os.environ.pop(_SKIP_VARIABLE)
        if former is not None:
            os.environ[_SKIP_VARIABLE] = former


def requires_jax(func: Callable[..., object]) -> Callable[..., Any]:
    """A decorator for functions that use jax: the device client is started before they run."""

    @functools.wraps(func)
    def call(*args: object, **kwargs: object) -> Any:
        jax_import_guard()
        with jax_env_context():
            return func(*args, **kwargs)

    return call
