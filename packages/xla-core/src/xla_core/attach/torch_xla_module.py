"""``torch.xla``: what PyTorch itself asks the module of a device type for.

``torch.utils.checkpoint`` and ``torch.random.fork_rng`` look up a device's random state there, and
``torch.get_device_module('xla')`` returns it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final, NoReturn

import torch

from xla_core.api import xla_model
from xla_core.execution import runtime
from xla_core.recording import random_state

MSG_NO_STREAMS: Final = (
    "module {module!r} has no attribute {name!r}: programs on xla run in the order in which they are recorded, "
    "there are no streams and events to order them by. torch's fully_shard (FSDP2) is made of these: use "
    "torch_xla.distributed.fsdp.XlaFullyShardedDataParallel, or DistributedDataParallel"
)

_initialized: Final = True
"""torch.utils.checkpoint keeps the random state of initialized devices only."""


def is_available() -> bool:
    """Whether a device client can be started."""
    return device_count() > 0


def device_count() -> int:
    """The number of ``xla`` devices that this process addresses."""
    return xla_model.device_count()


def current_device() -> int:
    """The index of the calling thread's current device."""
    return int(xla_model.device().index)


def set_device(device: torch.device | int) -> None:
    """Make ``device`` the calling thread's current one. Raises IndexError when there is none such."""
    xla_model.device(_index(device))


@contextlib.contextmanager
def device(device: torch.device | int) -> Iterator[None]:
    """Make ``device`` the calling thread's current one inside a ``with`` block."""
    with runtime.current_device(_index(device)):
        yield


def get_rng_state(device: torch.device | str | int = "xla") -> torch.Tensor:
    """The random state of a device (default: the current one), an int64 tensor () on the CPU."""
    return torch.tensor(random_state.get_state(_index(device)), dtype=torch.int64)


def set_rng_state(new_state: torch.Tensor, device: torch.device | str | int = "xla") -> None:
    """Set the random state of a device (default: the current one), as ``get_rng_state`` gave it."""
    random_state.set_state(int(new_state), _index(device))


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    random_state.set_state(seed, current_device())


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(device_count()):
        random_state.set_state(seed, index)


def synchronize(device: torch.device | str | int = "xla") -> None:
    """Run what is pending on a device (default: the current one) and wait until it is done."""
    runtime.sync(torch.device("xla", _index(device)), wait=True)


def _index(device: object) -> int:
    if isinstance(device, int):
        return device
    return int(runtime.trace_of(device).device.index)


def __getattr__(name: str) -> NoReturn:
    if name in ("Event", "Stream", "current_stream", "default_stream", "set_stream", "stream"):
        raise AttributeError(MSG_NO_STREAMS.format(module=__name__, name=name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
