"""``clip_grad_norm_`` whose norm stays on the device, so that no value is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

MSG_FOREACH: Final = (
    "clip_grad_norm_(foreach=True): operators over lists of tensors have no advantage on an xla device; "
    "leave foreach out"
)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that the norm of all of them together is at most ``max_norm``.

    ``parameters`` is a tensor or several, of any shapes; ``norm_type`` (default: 2.0) is the kind of norm. Returns
    the norm before scaling as a tensor of shape (), which is 0 on the current device if there is no gradient. With
    ``error_if_nonfinite`` (default: False) the norm's value is read, which ends the step here, and an infinite or
    NaN norm raises RuntimeError. Raises RuntimeError for ``foreach=True``.
    """
    if foreach:
        raise RuntimeError(MSG_FOREACH)
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if all(p.grad is None for p in given):
        return torch.tensor(0.0, device="xla")
    return torch.nn.utils.clip_grad_norm_(
        given, max_norm, norm_type, error_if_nonfinite, foreach=False
    )
