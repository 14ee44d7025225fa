"""What runs at ``import torch`` (entry point ``torch.backends``): the device guard, nothing slow.

Autograd counts the devices at the process's first backward pass, so the guard must be there
before that. jax and the lowering rules are loaded by ``import torch_xla``, or when the first tensor
on ``xla`` is made. An exception here would break ``import torch``; it is kept for later.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch._ops import OpOverload

from xla_core.recording import random_state
from xla_core.support import messages
from xla_core.support.once import Once
from xla_core.torch_bridge import device_guard

OWN_MARK: Final = "xla.core"
"""In the version of the metadata-only distribution ``torch-xla`` that belongs to this project."""

MSG_OFFICIAL: Final = (
    "the official package torch_xla {found} is installed beside xla-core; both bring the module torch_xla and "
    "the device 'xla', and only one can be in an environment: pip uninstall torch_xla, then "
    "pip install --force-reinstall xla-core (their files overlap)"
)

_failure: list[RuntimeError] = []
_loading: Final = Once()
_LOADING_PRIORITY: Final = 30  # torch's own devices have 10 to 26
_early: Final = Once()  # begun when the guard's registration is tried at import torch


def autoload() -> None:
    """Register the device guard; never raises."""
    _early.begin()
    try:
        messages.obey()
        _attach()
    except Exception as error:
        _failure.append(RuntimeError(str(error)))


def _official_package() -> str | None:
    """Version and place of PyTorch/XLA's own package in this environment, if it is there."""
    try:
        package = importlib.metadata.distribution("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        return None
    if OWN_MARK in package.version:
        return None
    return f"{package.version} in {package.locate_file('')}"


def _attach() -> None:
    official = _official_package()
    if official is not None:
        raise RuntimeError(MSG_OFFICIAL.format(found=official))
    device_guard.register()
    compat = importlib.import_module("xla_core.torch_bridge.torch_private")
    compat.register_factory_fallback(_factory)
    if _loading.begin():
        torch.serialization.register_package(_LOADING_PRIORITY, lambda _storage: None, _restore)
    # before torch_xla is imported: a seed that was set earlier counts
    compat.seed_with_torch(random_state.seed_all)


def _restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """Load ``storage`` to an ``xla`` device, which nothing in this process may have used yet."""
    if location.partition(":")[0] != "xla":
        return None
    ensure()
    restored: torch.UntypedStorage | None = importlib.import_module(
        "xla_core.torch_features.saving"
    ).restore(storage, location)
    return restored


def ensure() -> None:
    """Attach the device to torch completely: rules, dispatcher, optimizers.

    Raises RuntimeError naming the torch version where that cannot be done, ImportError where jax or
    jaxlib is of a version that is not known.
    """
    if _failure:
        raise _failure[0]
    with _without_collections():
        _attach()
        importlib.import_module("xla_core.jax_bridge.jax_versions").check()
        importlib.import_module("xla_core.dispatch.resolve").install()
        if torch.distributed.is_available():
            # torch 2.11 to 2.15: its dispatcher imports this at a subclass's first operator
            importlib.import_module("torch.distributed.tensor")
    compat = importlib.import_module("xla_core.torch_bridge.torch_private")
    compat.register_device_module(importlib.import_module("xla_core.attach.torch_xla_module"))
    importlib.import_module("xla_core.execution.generator").install()
    importlib.import_module("xla_core.recording.uninitialized").install()
    importlib.import_module("xla_core.torch_features.autocast").install()
    importlib.import_module("xla_core.torch_features.unordered_scatters").install()
    importlib.import_module("xla_core.computations.recurrent").install(_recurrent_nets)
    importlib.import_module("xla_core.execution.eager_mode").switch_on_if_asked()
    importlib.import_module("xla_core.torch_features.checkpoint_staging").install()
    compat.when_dynamo_is_used(_prepare_dynamo)
    if _early.begin():
        compat.explain_late_backward()


def _recurrent_nets() -> object:
    return importlib.import_module("xla_core.kernels.recurrent_nets")


def _prepare_dynamo() -> None:
    """What ``torch.compile`` needs of us, and the operators of higher order that go through it."""
    importlib.import_module("xla_core.computations.loops")
    importlib.import_module("xla_core.dynamo.dynamo_backend").prepare()


# More objects than this since the last collection: something was imported.
_MANY: Final = 20_000


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Pause Python's cyclic garbage collector, if it runs.

    Importing makes some hundred thousand objects and next to no garbage; each full collection on the way
    looks at all of them, a third of the time that the imports take. At the end they are filed as old
    without being looked at: they would be looked at once per generation otherwise, in the first moments
    of the program.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if gc.get_count()[0] > _MANY:
            _file_as_old()


def _file_as_old() -> None:
    """Move all objects to the garbage collector's oldest generation, as if it had examined them."""
    if gc.get_freeze_count():
        gc.collect()  # other code has frozen objects, and unfreezing would affect those as well
    else:
        gc.freeze()
        gc.unfreeze()


_handler_of: list[Callable[[object], Callable[..., object]]] = []


def _factory(overload: OpOverload, *args: object, **kwargs: object) -> object:
    if not _handler_of:
        ensure()
        _handler_of.append(importlib.import_module("xla_core.recording.xla_tensor").handler_of)
    return _handler_of[0](overload)(args, kwargs)
