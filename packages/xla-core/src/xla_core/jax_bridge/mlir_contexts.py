"""MLIR contexts that are used again: making one, with all of jax's dialects, takes 3 ms.

A context keeps every type, attribute and constant that was ever made in it, so it is replaced by a new
one from time to time. Each thread has its own.
"""

from __future__ import annotations

import threading
from typing import Any, Final

# jax 0.10.2: a context in which all dialects that XLA accepts are loaded
from jax._src.interpreters import mlir as _mlir

MOST_USES: Final = 256
MOST_BYTES: Final = 16 << 20
"""Bytecode of the modules that were read or made in a context: about what its constants take."""


class _Kept(threading.local):
    context: Any = None
    uses = 0
    nbytes = 0


_kept = _Kept()


def context(nbytes: int = 0) -> Any:
    """An MLIR context for one module, of ``nbytes`` of bytecode as far as that is known.

    The module may outlive the context's replacement.
    """
    if _kept.context is None or _kept.uses >= MOST_USES or _kept.nbytes > MOST_BYTES:
        _kept.context = _mlir.make_ir_context()
        _kept.uses = _kept.nbytes = 0
    _kept.uses += 1
    _kept.nbytes += nbytes
    return _kept.context


def count(nbytes: int) -> None:
    """Count bytes of a module that was made in this thread's context."""
    _kept.nbytes += nbytes
