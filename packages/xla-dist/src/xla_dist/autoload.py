"""Runs at ``import torch``: registers the backend ``xla`` of torch.distributed, its meshes, and ``xla://``.

It must be fast: the backend itself is imported when a process group is created. It never raises.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

import torch.distributed

from xla_core.support.once import Once

logger = logging.getLogger(__name__)

BACKEND: Final = "xla"
_former_scheme: Final = Once()


def autoload() -> None:
    """Register the backend and its rendezvous handler, once; does nothing if torch has no distributed package."""
    if not torch.distributed.is_available() or hasattr(torch.distributed.Backend, "XLA"):
        return
    try:
        torch.distributed.Backend.register_backend(
            BACKEND, _create, extended_api=True, devices=[BACKEND]
        )
        torch.distributed.register_rendezvous_handler(BACKEND, pjrt_rendezvous_handler)
        private = importlib.import_module("xla_core.extension_api.distributed")
        private.record_nothing_of(BACKEND)
        private.give_meshes_groups(_is_over_processes)
    except Exception as error:  # `import torch` must not fail because of this
        logger.warning("torch.distributed's backend 'xla' is not available: %s", error)


def _create(options: object, backend_options: object) -> object:
    return importlib.import_module("xla_dist.collectives.process_group").create(
        options, backend_options
    )


def _is_over_processes(size: int) -> bool:
    return bool(
        importlib.import_module("xla_dist.collectives.process_meshes").is_over_processes(size)
    )


def pjrt_rendezvous_handler(
    url: str, timeout: timedelta | None = None, **kwargs: object
) -> Iterator[tuple[object, int, int]]:
    """The rendezvous handler of ``xla://``: yields a store, this process's rank and the number of processes.

    ``url`` is ignored. ``timeout`` is the store's (default: torch's).
    """
    del kwargs  # torch passes rank and world size, which the job's environment determines
    yield importlib.import_module("xla_dist.processes.kv_store").join(url, timeout)


def register_former_scheme() -> None:
    """Also register ``pjrt://``, the former name of ``xla://``, as an ``init_method``; later calls do nothing."""
    if _former_scheme.begin():
        torch.distributed.register_rendezvous_handler("pjrt", pjrt_rendezvous_handler)
