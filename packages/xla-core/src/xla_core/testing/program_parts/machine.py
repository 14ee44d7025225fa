"""A tiny machine that runs the same list of tensor operations on any device.

An instruction calls a tensor method or a ``torch`` function on numbered slots. Running a program
on the CPU and on ``xla`` gives two logs of observations that have to be equal. The CPU's run
comes first: it also says where a program stops being defined (an in-place operation that reads
memory it is writing), so that only what PyTorch defines is compared.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from xla_core.extension_api.operators import Operand
from xla_core.testing.program_parts.instructions import (
    Instruction,
    Program,
    Raised,
    Slot,
    UndefinedProgramError,
    Vary,
)
from xla_core.testing.program_parts.machine_operations import OPERATIONS
from xla_core.testing.program_parts.machine_state import MachineState
from xla_core.testing.program_parts.memory import (
    geometry,
    overlaps_itself,
    refused_by_torch,
    shares_memory,
)
from xla_core.torch_bridge import error_texts

# Operators that read each element before they write it: operand and target may be the same tensor.
ELEMENTWISE: Final = frozenset(
    {"add_", "sub_", "mul_", "copy_", "clamp_", "addcmul_", "torch.add", "torch.sub", "torch.mul"}
    | {"torch.maximum", "maximum", "logical_and_", "bitwise_xor_", "neg_", "abs_", "where"}
)

# PyTorch promises neither a refusal nor a result for these on a tensor that overlaps itself.
_UNCHECKED: Final = frozenset({"index_put_", "masked_fill_", "__setitem__", "index_fill_"})

# Methods that change a tensor's shape in place, without its elements.
_RESHAPES: Final = ("t_", "transpose_", "squeeze_", "unsqueeze_")


class Machine(MachineState):
    """Slots with tensors on one device, and the log of what was observed.

    ``sync`` ends a step on that device. ``stop`` is how many instructions to run at most.
    """

    def __init__(self, device: torch.device, sync: Callable[[], None]) -> None:
        super().__init__(device, sync)
        self.executed = 0
        self._reshaped: list[torch.Tensor] = []

    # -- running -------------------------------------------------------------------------------

    def run(self, program: Program, stop: int | None = None) -> None:
        """Run the whole program, or its first ``stop`` instructions, and observe all that is left.

        On the CPU it ends early, without an error, where the program stops being defined.
        """
        with contextlib.suppress(UndefinedProgramError):
            for instruction in _unrolled(program, self):
                if self.executed == stop:
                    break
                self.execute(instruction)
        self.observe_all()

    def execute(self, instruction: Instruction) -> None:
        """Run one instruction; an exception of PyTorch's goes to the log.

        An instruction whose operands are gone does nothing. Raises UndefinedProgramError.
        """
        used = set(_slots_in((instruction.args, instruction.kwargs)))
        if not used <= self.slots.keys():
            self.executed += 1
            return
        if self.device.type == "cpu":
            self._check_defined(instruction)
        self.executed += 1
        try:
            results = self._call(instruction)
        except UndefinedProgramError:
            self.executed -= 1
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
            # views of another shape, positions out of range, dtypes that a CPU kernel does not have: a device
            # without strides, with values not known yet, has no such errors
            if self.device.type == "cpu" and error_texts.is_limit_of_cpu_kernels(error):
                self.executed -= 1
                raise UndefinedProgramError from None
            self.log.append(Raised(type(error).__name__, f"{instruction}: {error}"))
            return
        outputs = results if isinstance(results, (tuple, list)) else (results,)
        for slot, value in zip(instruction.results, outputs, strict=False):
            if value is None:
                self.slots.pop(slot, None)
            else:
                self.slots[slot] = value
                self.versions[slot] = value._version

    def _call(self, instruction: Instruction) -> Operand:
        args = [self._resolve(a) for a in instruction.args]
        kwargs = {name: self._resolve(a) for name, a in instruction.kwargs}
        target = instruction.target
        own = OPERATIONS.get(target)
        scope = contextlib.nullcontext() if instruction.grad else torch.no_grad()
        with scope, warnings.catch_warnings():
            # a resized out=, a mask on an expanded tensor: the values are what is compared here
            warnings.simplefilter("ignore")
            if own is not None:
                return own(self, *args, **kwargs)
            if target.startswith("torch."):
                return getattr(torch, target.removeprefix("torch."))(*args, **kwargs)
            return getattr(args[0], target)(*args[1:], **kwargs)

    def _resolve(self, a: Operand) -> Operand:
        if isinstance(a, Slot):
            return self.slots[a.index]
        if isinstance(a, Vary):
            return a.values[self.iteration % len(a.values)]
        if isinstance(a, (list, tuple)):
            return type(a)(self._resolve(item) for item in a)
        return a

    # -- what is defined -----------------------------------------------------------------------

    def _check_defined(self, instruction: Instruction) -> None:
        if _out_of_range(instruction.target, [self._resolve(a) for a in instruction.args]):
            raise UndefinedProgramError  # not even the CPU checks this everywhere
        for index in instruction.writes:
            self._check_memory(instruction, index)
            self._check_history(instruction, index)
        self._check_promised(instruction)

    def _check_memory(self, instruction: Instruction, written: int) -> None:
        """Whether an instruction reads nothing else of the memory that it writes."""
        target = self.slots[written]
        checked = refused_by_torch(target) and instruction.target not in _UNCHECKED
        if overlaps_itself(target) and not checked:
            raise UndefinedProgramError
        operands = list(_slots_in((instruction.args, instruction.kwargs)))
        operands.remove(written)  # the target itself; a second mention is an operand
        for operand in (self.slots[other] for other in operands):
            alike = geometry(operand) == geometry(target) and instruction.target in ELEMENTWISE
            if not alike and shares_memory(operand, target):
                raise UndefinedProgramError

    def _check_history(self, instruction: Instruction, written: int) -> None:
        """Whether a write gives no history to a view of what has got another shape since."""
        base = self.slots[written]._base
        if base is None or not any(t is base for t in self._reshaped):
            return
        operands = _slots_in((instruction.args, instruction.kwargs))
        if any(self.slots[index].requires_grad for index in operands):
            raise UndefinedProgramError  # made from strides, or by repeating the view on that shape

    def _check_promised(self, instruction: Instruction) -> None:
        """Whether PyTorch says anywhere what an instruction does to these tensors."""
        target = instruction.target
        if "_foreach_" in target and not self._succeeds(instruction):
            raise UndefinedProgramError  # the CPU has written to some of its tensors by then
        if target not in ("set_", "resize_", "swap", "requires_grad_", "detach_", *_RESHAPES):
            return
        tensors = [self._resolve(a) for a in instruction.args]
        first = tensors[0]
        seen_through = any(t._base is first for t in self.slots.values())
        if target in ("set_", "resize_", *_RESHAPES):
            self._reshaped.append(first)
        if target in ("set_", *_RESHAPES):
            moved = target == "set_" and first._is_view()
            if first.requires_grad and (seen_through or moved):
                # histories of views that no longer exist: made again from strides, or not at all
                raise UndefinedProgramError
            return
        if target == "resize_":
            # in a later iteration a mask may have selected fewer elements than it is resized to
            if math.prod(tensors[1]) > tensors[0].numel():
                raise UndefinedProgramError
            return
        if target != "detach_" and any(t._is_view() for t in tensors):
            # refused if anything refers to them, views of views among it; a leaf amid views
            raise UndefinedProgramError
        if target == "detach_" and seen_through:
            raise UndefinedProgramError  # views of what is detached
        if target == "requires_grad_" and seen_through and any(t is first for t in self._reshaped):
            raise UndefinedProgramError  # as above: only now the views get histories

    def _succeeds(self, instruction: Instruction) -> bool:
        """Whether an operator on a list of CPU tensors works, tried on copies."""
        tensors, *rest = (self._resolve(a) for a in instruction.args)
        if any(overlaps_itself(t) for t in tensors):
            return False  # refused, which copies would not show
        try:
            with torch.no_grad():
                function = getattr(torch, instruction.target.removeprefix("torch."))
                function([t.clone() for t in tensors], *rest)
        except RuntimeError:
            return False
        return True


def _unrolled(program: Program, machine: Machine) -> Iterator[Instruction]:
    yield from program.setup
    for iteration in range(program.iterations):
        machine.iteration = iteration
        yield from program.body


def _slots_in(a: Operand) -> Iterator[int]:
    if isinstance(a, Slot):
        yield a.index
    elif isinstance(a, (list, tuple)):
        for item in a:
            yield from _slots_in(item)


def _out_of_range(target: str, args: Sequence[Operand]) -> bool:
    """Whether an index tensor of an indexing operator leaves its dimension."""
    if target in ("__getitem__", "__setitem__", "index_put_"):
        dim, index = 0, args[1]
    elif target.startswith("index_"):
        dim, index = args[1], args[2]
    else:
        return False
    if isinstance(index, tuple):
        index = index[0] if index else None
    if not isinstance(index, torch.Tensor) or index.dtype != torch.int64 or not index.numel():
        return False
    shape = args[0].shape
    return not -len(shape) <= dim < len(shape) or int(index.max()) >= shape[dim]
