"""Optimizers whose step is skipped on the device when a gradient is infinite: the host never waits.

They are torch's own in their fused form, which takes ``found_inf`` as an operand.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Closure = Callable[[], Any] | None
FoundInf: TypeAlias = torch.Tensor | float | None


class _Fused:
    """Arguments as torch's optimizers take them, ``fused`` unless the caller says otherwise."""

    param_groups: list[dict[str, Any]]
    found_inf: torch.Tensor

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **{"fused": True, **kwargs})  # type: ignore[call-arg]

    def _step(self, step: Callable[..., Any], closure: Closure, found_inf: FoundInf) -> Any:
        # The base class's step without its wrappers: ours runs the hooks.
        plain = inspect.unwrap(step)
        with torch.no_grad():
            if found_inf is None:
                return plain(self, closure)
            if isinstance(found_inf, torch.Tensor):
                found: torch.Tensor = found_inf
            else:
                device = self.param_groups[0]["params"][0].device
                found = torch.full((), float(found_inf), device=device)
            # where torch's optimizers look for it, as its GradScaler leaves it
            self.found_inf = found.to(torch.float32)
            try:
                return plain(self, closure)
            finally:
                del self.found_inf


class SGD(_Fused, torch.optim.SGD):
    """``torch.optim.SGD`` whose ``step`` takes ``found_inf``."""

    def step(self, closure: Closure = None, found_inf: FoundInf = None) -> Any:  # type: ignore[override]
        """One step; where ``found_inf`` (a number, or a tensor of one element) is 1, nothing changes."""
        return self._step(torch.optim.SGD.step, closure, found_inf)


class Adam(_Fused, torch.optim.Adam):
    """``torch.optim.Adam`` whose ``step`` takes ``found_inf``."""

    def step(self, closure: Closure = None, found_inf: FoundInf = None) -> Any:  # type: ignore[override]
        """One step; where ``found_inf`` (a number, or a tensor of one element) is 1, nothing changes."""
        return self._step(torch.optim.Adam.step, closure, found_inf)


class AdamW(_Fused, torch.optim.AdamW):
    """``torch.optim.AdamW`` whose ``step`` takes ``found_inf``."""

    def step(self, closure: Closure = None, found_inf: FoundInf = None) -> Any:  # type: ignore[override]
        """One step; where ``found_inf`` (a number, or a tensor of one element) is 1, nothing changes."""
        return self._step(torch.optim.AdamW.step, closure, found_inf)
