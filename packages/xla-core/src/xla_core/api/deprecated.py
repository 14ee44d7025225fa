"""Names that torch_xla removed and that libraries still call: each works, and warns once per line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import torch

from xla_core.execution import ordinals

MSG_DEPRECATED: Final = "{old} is deprecated; use {new}"


def _alias(old: str, new: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(MSG_DEPRECATED.format(old=old, new=new), DeprecationWarning, stacklevel=2)
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = old.rpartition(".")[2]
    call.__doc__ = f"Deprecated name of ``{new}``."
    return call


get_ordinal: Final = _alias(
    "xm.get_ordinal", "torch_xla.runtime.global_ordinal", ordinals.global_ordinal
)
xrt_world_size: Final = _alias(
    "xm.xrt_world_size", "torch_xla.runtime.world_size", ordinals.world_size
)
using_pjrt: Final = _alias("xr.using_pjrt", "nothing: it is always True", lambda: True)


class GradScaler(torch.amp.GradScaler):
    """Deprecated name of ``torch.amp.GradScaler('xla')``; not needed with bfloat16."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        warnings.warn(
            MSG_DEPRECATED.format(
                old="torch_xla.amp.GradScaler", new="torch.amp.GradScaler('xla')"
            ),
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__("xla", *args, **kwargs)
