"""What a machine holds: slots with tensors, and the log of what was observed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from xla_core.testing.program_parts.instructions import Observation, Raised


class MachineState:
    """Slots with tensors on one device, and the log of what was observed.

    ``sync`` ends a step on that device.
    """

    def __init__(self, device: torch.device, sync: Callable[[], None]) -> None:
        self.device = device
        self.sync = sync
        self.slots: dict[int, torch.Tensor] = {}
        self.versions: dict[int, int] = {}
        self.log: list[object] = []
        self.iteration = 0
        self.closures: list[Callable[[], torch.Tensor]] = []

    def observe(self, where: str, t: torch.Tensor, since: int | None = None) -> None:
        """Log a tensor's value, what autograd thinks of it, and how often it was written ``since``.

        Versions count from when a slot was bound: how often the autograd engine itself added to a
        gradient in place is not defined.
        """
        writes = None if since is None else t._version - since
        try:
            facts = (t.dtype, t.requires_grad, t.is_leaf, writes, t._is_view(), t.grad_fn is None)
        except RuntimeError as error:  # a view that autograd has given up
            self.log.append(Raised(type(error).__name__, str(error)))
            return
        self.log.append(Observation(where, t.detach().cpu().clone(), facts))

    def observe_all(self) -> None:
        """Log every slot, the gradients of the leaves, and what closures captured."""
        for index in sorted(self.slots):
            t = self.slots[index]
            self.observe(f"s{index}", t, self.versions[index])
            if has_grad(t):
                self.observe(f"s{index}.grad", t.grad)
        for number, closure in enumerate(self.closures):
            self.observe(f"closure {number}", closure())


def has_grad(t: torch.Tensor) -> bool:
    """Whether a leaf has a gradient; a view that autograd has given up has none."""
    try:
        return t.is_leaf and t.grad is not None
    except RuntimeError:
        return False
