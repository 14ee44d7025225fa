"""What runs at ``import torch``: torch.distributed learns of the backend ``xla``, its meshes, and ``xla://``.

Nothing slow: the backend itself is imported when a process group is made. Never raises.
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
_former: Final = Once()


def autoload() -> None:
    """Register backend and rendezvous handler, once; does nothing where torch lacks distributed."""
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
    except Exception as error:  # breaking `import torch` would be worse
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
    """The handler of ``xla://``: yields a store, this process's rank and the number of processes."""
    del kwargs  # nothing to choose
    yield importlib.import_module("xla_dist.processes.kv_store").join(url, timeout)


def register_former_scheme() -> None:
    """Let ``init_method="pjrt://"``, the former name of ``xla://``, work, too; once."""
    if _former.begin():
        torch.distributed.register_rendezvous_handler("pjrt", pjrt_rendezvous_handler)
