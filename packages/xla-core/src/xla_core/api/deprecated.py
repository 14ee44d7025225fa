"""Names that torch_xla removed and that libraries still use: each works, and warns once per calling line."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Final, TypeVar, cast

import torch

from xla_core.execution import ordinals

F = TypeVar("F", bound=Callable[..., object])
_T = TypeVar("_T")

MSG_DEPRECATED: Final = "{old} is deprecated; use {new}"


def _alias(old: str, new: str, function: Callable[..., _T]) -> Callable[..., _T]:
    def call(*args: object, **kwargs: object) -> _T:
        warnings.warn(MSG_DEPRECATED.format(old=old, new=new), DeprecationWarning, stacklevel=2)
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = old.rpartition(".")[2]
    call.__doc__ = f"Deprecated name of ``{new}``."
    return call


def mark_deprecated(new: F, extra_msg: str | None = None) -> F:
    """A function like ``new`` that also warns with a DeprecationWarning, which ends with ``extra_msg``."""
    return _warning(f"{new.__module__}.{new.__name__} is deprecated", new, extra_msg)


def deprecated(
    module: ModuleType, new: F, old_name: str | None = None, extra_msg: str | None = None
) -> F:
    """A function like ``new`` that warns that its former name in ``module`` is deprecated.

    ``old_name`` is that name (default: the name of ``new``); the warning ends with ``extra_msg``.
    """
    old = f"{module.__name__}.{old_name or new.__name__}"
    text = MSG_DEPRECATED.format(old=old, new=f"{new.__module__}.{new.__name__}")
    return _warning(text, new, extra_msg)


def register_deprecated(module: ModuleType, new: F) -> None:
    """Add ``deprecated(module, new)`` to ``module`` under the name of ``new``."""
    setattr(module, new.__name__, deprecated(module, new))


def _warning(text: str, new: F, extra: str | None) -> F:
    @functools.wraps(new)
    def call(*args: object, **kwargs: object) -> object:
        warnings.warn(f"{text}. {extra}" if extra else text, DeprecationWarning, stacklevel=2)
        return new(*args, **kwargs)

    return cast("F", call)


get_ordinal: Final = _alias(
    "xm.get_ordinal", "torch_xla.runtime.global_ordinal", ordinals.global_ordinal
)
xrt_world_size: Final = _alias(
    "xm.xrt_world_size", "torch_xla.runtime.world_size", ordinals.world_size
)
using_pjrt: Final = _alias("xr.using_pjrt", "nothing: PJRT is always used", lambda: True)


class GradScaler(torch.amp.GradScaler):
    """Deprecated name of ``torch.amp.GradScaler('xla')``; not needed with bfloat16."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        warnings.warn(
            MSG_DEPRECATED.format(
                old="torch_xla.amp.GradScaler", new="torch.amp.GradScaler('xla')"
            ),
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__("xla", *args, **kwargs)
