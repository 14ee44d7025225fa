"""Writes a random program down while a CPU machine runs it, and chooses operands among what is there."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Final

import torch

from xla_core.extension_api.operators import Operand
from xla_core.testing.program_parts.instructions import (
    Instruction,
    Raised,
    Slot,
    UndefinedProgramError,
    Vary,
)
from xla_core.testing.program_parts.machine import Machine

_SCALARS: Final = (0.5, 2.0, -1.0, 1.5, 0.25, -2.0, 3.0, 0.0, 1.0)
_LARGE: Final = 64


class ProgramWriter:
    """A program so far; the state of its CPU machine is what the next instruction may use."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.machine = Machine(torch.device("cpu"), lambda: None)
        self.instructions: list[Instruction] = []
        self.next = 0
        self.quiet = 0

    def emit(self, instruction: Instruction) -> bool:
        """Run an instruction on the CPU and keep it, if it is defined; whether it was kept."""
        if self.quiet and instruction.grad:
            instruction = _without_grad(instruction)
        known = len(self.machine.log)
        try:
            self.machine.execute(instruction)
        except UndefinedProgramError:
            return False
        raised = any(isinstance(entry, Raised) for entry in self.machine.log[known:])
        # a failed backward has changed gradients already: it stays
        if raised and instruction.target != "run_backward" and self.random.random() > 0.15:
            return False
        self.instructions.append(instruction)
        if not raised:
            for index in (*instruction.results, *instruction.writes):
                self._keep_small(index)
        return True

    def _keep_small(self, index: int) -> None:
        t = self.machine.slots.get(index)
        if t is None or t.dtype == torch.bool or not t.numel() or t.detach().abs().max() <= _LARGE:
            return
        self.emit(Instruction("clamp_", (Slot(index), -8, 8), writes=(index,), grad=False))

    # -- choices -------------------------------------------------------------------------------

    def new(self) -> int:
        """A new slot number."""
        self.next += 1
        return self.next - 1

    def shape(self) -> tuple[int, ...]:
        """0 to 4 small dimensions, sometimes of size 0 or 1."""
        rank = self.random.choices(range(5), (1, 3, 5, 3, 1))[0]
        return tuple(self.random.choices((0, 1, 2, 3, 4), (1, 3, 6, 6, 4))[0] for _ in range(rank))

    def fresh(self, shape: Sequence[int], dtype: torch.dtype) -> Slot:
        """A new input with other values in every iteration."""
        index = self.new()
        args = (f"{self.seed}/{index}", tuple(shape), dtype)
        self.emit(Instruction("input", args, results=(index,)))
        return Slot(index)

    def slot(
        self,
        accepted: Callable[[torch.Tensor], bool] = lambda t: True,
        dtype: torch.dtype = torch.float32,
    ) -> Slot:
        """A slot whose tensor is ``accepted``; a new input of ``dtype`` if there is none."""
        return self.maybe(accepted) or self.fresh((2, 3), dtype)

    def maybe(self, accepted: Callable[[torch.Tensor], bool]) -> Slot | None:
        """A slot whose tensor is ``accepted``, or None."""
        indices = []
        for index, t in self.machine.slots.items():
            with contextlib.suppress(RuntimeError):  # a view that autograd has given up
                if accepted(t):
                    indices.append(index)
        return Slot(self.random.choice(indices)) if indices else None

    def tensor(self, slot: Slot) -> torch.Tensor:
        """The CPU tensor in a slot."""
        return self.machine.slots[slot.index]

    def number(self, t: torch.Tensor) -> Operand:
        """A number for ``t``: a constant, or one that varies from iteration to iteration."""
        if t.dtype == torch.bool:
            return self.random.random() < 0.5
        scalars: Sequence[float] = _SCALARS
        if not t.is_floating_point() or t.dtype == torch.bfloat16:
            scalars = (2, -1, 3, 0, 1)
        if self.random.random() < 0.5:
            return self.random.choice(scalars)
        return Vary(tuple(self.random.choice(scalars) for _ in range(3)))

    def fitting(self, t: torch.Tensor) -> Slot:
        """An operand that broadcasts to ``t``, in a dtype that in-place operations take."""

        def fits(u: torch.Tensor) -> bool:
            if u is t or not torch.can_cast(u.dtype, t.dtype):
                return False
            try:
                return torch.broadcast_shapes(u.shape, t.shape) == t.shape
            except RuntimeError:
                return False

        slot = self.maybe(fits) if self.random.random() < 0.7 else None
        if slot is None:
            start = self.random.randint(0, t.dim())
            slot = self.fresh(t.shape[start:], t.dtype)
        if self.random.random() < 0.3:
            copied = self.new()
            self.emit(Instruction("clone", (slot,), results=(copied,)))
            return Slot(copied)
        return slot

    def dim(self, t: torch.Tensor) -> int:
        """A dimension of ``t``, counted from either end."""
        return self.random.randrange(-t.dim(), t.dim()) if t.dim() else 0

    def positions(self, size: int, count: int) -> Slot | None:
        """An int64 tensor of ``count`` distinct positions below ``size``."""
        if size < count:
            return None
        chosen = tuple(self.random.sample(range(size), count))
        index = self.new()
        self.emit(Instruction("positions", (chosen,), results=(index,)))
        return Slot(index)


def _without_grad(instruction: Instruction) -> Instruction:
    return Instruction(
        instruction.target,
        instruction.args,
        instruction.kwargs,
        instruction.results,
        instruction.writes,
        False,
    )


# -- comparing -------------------------------------------------------------------------------------
