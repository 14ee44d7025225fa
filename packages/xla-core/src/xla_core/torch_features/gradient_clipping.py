"""``clip_grad_norm_`` that reads no value: the norm stays on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

MSG_FOREACH: Final = (
    "clip_grad_norm_(foreach=True): operators over lists of tensors bring an xla device nothing; "
    "leave foreach out"
)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_``; without any gradient the norm is a zero on the current device.

    Scales the gradients of ``parameters`` (a tensor or several, of any shapes) in place, so that the
    ``norm_type`` norm of all of them together is at most ``max_norm``. Returns the norm as it was, a tensor
    without dimensions. With ``error_if_nonfinite`` the step ends here, because the norm's value is read, and a
    norm that is infinite or NaN raises RuntimeError. Raises RuntimeError for ``foreach=True``.
    """
    if foreach:
        raise RuntimeError(MSG_FOREACH)
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if all(p.grad is None for p in given):
        return torch.tensor(0.0, device="xla")
    return torch.nn.utils.clip_grad_norm_(
        given, max_norm, norm_type, error_if_nonfinite, foreach=False
    )
