"""A tiny machine that runs the same list of tensor operations on any device.

An instruction calls a tensor method or a ``torch`` function on numbered slots. Running a program
on the CPU and on ``xla`` gives two logs of observations that have to be equal. The CPU's run
comes first: it also says where a program stops being defined (an in-place operation that reads
memory it is writing), so that only what PyTorch defines is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from xla_core.extension_api.operators import Operand, Operands
from xla_core.torch_bridge import error_texts

# Operators that read each element before they write it: operand and target may be the same tensor.
ELEMENTWISE: Final = frozenset(
    {"add_", "sub_", "mul_", "copy_", "clamp_", "addcmul_", "torch.add", "torch.sub", "torch.mul"}
    | {"torch.maximum", "maximum", "logical_and_", "bitwise_xor_", "neg_", "abs_", "where"}
)

# PyTorch promises neither a refusal nor a result for these on a tensor that overlaps itself.
_UNCHECKED: Final = frozenset({"index_put_", "masked_fill_", "__setitem__", "index_fill_"})

_MINUS_ZERO: Final = re.compile(r"-(0\.0*)(?!\d)")


FACTS: Final = "(dtype, requires_grad, leaf, writes, view, no grad_fn)"
"""The facts of an ``Observation``, in order."""


# Methods that change a tensor's shape in place, without its elements.
_RESHAPES: Final = ("t_", "transpose_", "squeeze_", "unsqueeze_")


class UndefinedProgramError(Exception):
    """The next instruction has no defined result: it reads memory that it overwrites."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A reference to a tensor of the machine."""

    index: int

    def __repr__(self) -> str:
        return f"s{self.index}"


@dataclasses.dataclass(frozen=True, slots=True)
class Vary:
    """A number that is another one in every iteration of the program's loop."""

    values: tuple[float | int, ...]

    def __repr__(self) -> str:
        return f"vary{self.values}"


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One call: ``target`` is a method of the first argument, ``torch.f``, or a machine operation.

    ``results`` are the slots that take what it returns, ``writes`` those it writes to.
    """

    target: str
    args: Operands = ()
    kwargs: tuple[tuple[str, object], ...] = ()
    results: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    grad: bool = True

    def __str__(self) -> str:
        bound = ", ".join(f"s{i}" for i in self.results)
        words = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs)]
        text = f"{self.target}({', '.join(words)})"
        return ("" if self.grad else "no_grad: ") + (f"{bound} = {text}" if bound else text)


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """Instructions run once, then a body run ``iterations`` times on the same slots."""

    seed: int
    setup: tuple[Instruction, ...]
    body: tuple[Instruction, ...]
    iterations: int

    def __str__(self) -> str:
        lines = [f"seed {self.seed}", *map(str, self.setup), f"{self.iterations} times:"]
        return "\n".join([*lines, *(f"    {i}" for i in self.body)])


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """What can be seen of one tensor, with its value on the CPU."""

    where: str
    value: torch.Tensor
    facts: tuple[object, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Raised:
    """An exception: its type, which must be equal on all devices, and its text, which need not."""

    kind: str
    text: str


def numbers(seed: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Small values on a coarse grid: sums and products of a few of them are exact in every dtype."""
    source = random.Random(seed)
    count = int(torch.Size(shape).numel())
    if dtype == torch.bool:
        flat: list[Operand] = [source.random() < 0.5 for _ in range(count)]
    elif dtype in (torch.float32, torch.float64):
        flat = [source.randint(-12, 12) / 4 for _ in range(count)]
    else:
        flat = [source.randint(-5, 5) for _ in range(count)]
    return torch.tensor(flat, dtype=dtype).reshape(tuple(shape)).clone()


class Machine:
    """Slots with tensors on one device, and the log of what was observed.

    ``sync`` ends a step on that device. ``stop`` is how many instructions to run at most.
    """

    def __init__(self, device: torch.device, sync: Callable[[], None]) -> None:
        self.device = device
        self.sync = sync
        self.slots: dict[int, torch.Tensor] = {}
        self.versions: dict[int, int] = {}
        self.log: list[object] = []
        self.iteration = 0
        self.executed = 0
        self.closures: list[Callable[[], torch.Tensor]] = []

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
            alike = _geometry(operand) == _geometry(target) and instruction.target in ELEMENTWISE
            if not alike and shares_memory(operand, target):
                raise UndefinedProgramError

    def _check_promised(self, instruction: Instruction) -> None:
        """Whether PyTorch says anywhere what an instruction does to these tensors."""
        target = instruction.target
        if "_foreach_" in target and not self._succeeds(instruction):
            raise UndefinedProgramError  # the CPU has written to some of its tensors by then
        if target in ("set_", *_RESHAPES):
            first = self._resolve(instruction.args[0])
            seen_through = any(t._base is first for t in self.slots.values())
            moved = target == "set_" and first._is_view()
            if first.requires_grad and (seen_through or moved):
                # histories of views that are no longer: made anew from strides, or not at all
                raise UndefinedProgramError
            return
        if target not in ("resize_", "swap", "requires_grad_", "detach_"):
            return
        tensors = [self._resolve(a) for a in instruction.args]
        if target == "resize_":
            # in a later iteration a mask may have selected fewer elements than it is resized to
            if math.prod(tensors[1]) > tensors[0].numel():
                raise UndefinedProgramError
            return
        if target != "detach_" and any(t._is_view() for t in tensors):
            # refused if anything refers to them, views of views among it; a leaf amid views
            raise UndefinedProgramError
        if target == "detach_" and any(t._base is tensors[0] for t in self.slots.values()):
            raise UndefinedProgramError  # views of what is detached

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

    # -- observing -----------------------------------------------------------------------------

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
            if _has_grad(t):
                self.observe(f"s{index}.grad", t.grad)
        for number, closure in enumerate(self.closures):
            self.observe(f"closure {number}", closure())


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


# -- memory of CPU tensors -----------------------------------------------------------------------


def _positions(t: torch.Tensor) -> torch.Tensor:
    """The element positions in the storage that a CPU tensor shows."""
    end = t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return torch.arange(end + 1).as_strided(t.shape, t.stride(), t.storage_offset()).flatten()


def _geometry(t: torch.Tensor) -> tuple[object, ...]:
    return t.untyped_storage().data_ptr(), t.shape, t.stride(), t.storage_offset(), t.dtype


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


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


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements of a CPU tensor are the same memory."""
    return t.numel() > 0 and _positions(t).unique().numel() < t.numel()


def refused_by_torch(t: torch.Tensor) -> bool:
    """Whether PyTorch sees that a CPU tensor overlaps itself: only if a stride is 0."""
    return any(n > 1 and s == 0 for n, s in zip(t.shape, t.stride(), strict=True))


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two CPU tensors have an element in common."""
    if not a.numel() or not b.numel():
        return False
    return _same_storage(a, b) and bool(torch.isin(_positions(a), _positions(b)).any())


# -- operations that are no methods ---------------------------------------------------------------


def _input(machine: Machine, seed: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return numbers(f"{seed}/{machine.iteration}", shape, dtype).to(machine.device)


def _positions_tensor(machine: Machine, chosen: Sequence[int]) -> torch.Tensor:
    return torch.tensor(chosen, dtype=torch.int64).to(machine.device)


def _reshaped(
    machine: Machine, t: torch.Tensor, name: str, copied: bool, *args: Operand
) -> torch.Tensor:
    """What is a view or a copy, depending on the strides; with ``copied`` surely a copy."""
    result = getattr(t, name)(*args)
    if copied:
        return result.clone()
    if machine.device.type == "cpu" and not _same_storage(result, t):
        raise UndefinedProgramError
    return result


def _copy_host(
    _machine: Machine, t: torch.Tensor, seed: str, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return t.copy_(numbers(seed, shape, dtype))


def _leaf(_machine: Machine, source: torch.Tensor) -> torch.Tensor:
    return source.detach().clone().requires_grad_()


def _drop(machine: Machine, index: int) -> None:
    machine.slots.pop(index, None)


def _rebind(_machine: Machine, source: torch.Tensor) -> torch.Tensor:
    return source


def _sync(machine: Machine) -> None:
    machine.sync()


def _observe(machine: Machine, t: torch.Tensor, where: str) -> None:
    machine.observe(where, t)


def _observe_all(machine: Machine) -> None:
    machine.observe_all()


def _item(machine: Machine, t: torch.Tensor) -> None:
    machine.log.append(Observation("item", torch.tensor(t.sum().item()), ()))


def _text(machine: Machine, t: torch.Tensor) -> None:
    # the CPU's text lacks the device, which may stand in a line of its own, and breaks lines elsewhere
    text = re.sub(r",\s*device='[^']*'", "", repr(t.detach()))
    # XLA computes x + 0 as x, which keeps the sign of a zero
    machine.log.append(_MINUS_ZERO.sub(r"\1", "".join(text.split())))


def _garbage(_machine: Machine, t: torch.Tensor) -> None:
    """Leave the tensor in a reference cycle, for the garbage collector to find some day."""
    cycle: list[object] = [t]
    cycle.append(cycle)


def _capture(machine: Machine, t: torch.Tensor) -> None:
    machine.closures.append(lambda: t)


def _backward(
    _machine: Machine, outputs: Sequence[torch.Tensor], weight: float, keep: bool
) -> None:
    loss = sum((o * weight).sum() for o in outputs)
    assert isinstance(loss, torch.Tensor)
    loss.backward(retain_graph=keep)


def _gradients(
    _machine: Machine, output: torch.Tensor, leaves: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    gradients = torch.autograd.grad(
        output.sum(), list(leaves), allow_unused=True, retain_graph=True
    )
    # whether the engine hands out a view is nowhere promised
    return [None if g is None else g.clone() for g in gradients]


def _has_grad(t: torch.Tensor) -> bool:
    """Whether a leaf has a gradient; a view that autograd has given up has none."""
    try:
        return t.is_leaf and t.grad is not None
    except RuntimeError:
        return False


def _grad(_machine: Machine, t: torch.Tensor) -> torch.Tensor | None:
    return t.grad if _has_grad(t) else None


def _clear_grad(_machine: Machine, t: torch.Tensor) -> None:
    t.grad = None


def _descend(_machine: Machine, t: torch.Tensor, rate: float) -> None:
    if _has_grad(t):
        assert t.grad is not None
        t.add_(t.grad, alpha=-rate)


def _data(_machine: Machine, t: torch.Tensor) -> torch.Tensor:
    return t.data


def _swap(_machine: Machine, a: torch.Tensor, b: torch.Tensor) -> None:
    torch.utils.swap_tensors(a, b)


def _set_data(_machine: Machine, t: torch.Tensor, value: torch.Tensor) -> None:
    t.data = value


def _tanh(_machine: Machine, t: torch.Tensor) -> torch.Tensor:
    """An inexact function, rounded to the grid of the other values."""
    return torch.round(torch.tanh(t) * 4) / 4


def _tame(_machine: Machine, t: torch.Tensor) -> torch.Tensor:
    """The tensor with small values, so that the next sums and products are exact again."""
    t = t.clamp(-8, 8)
    return torch.round(t * 4) / 4 if t.dtype in (torch.float32, torch.float64) else t


def _cast(_machine: Machine, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # what has no fraction and is small is the same number in every dtype
    return (t if t.dtype == torch.bool else t.clamp(-8, 8)).to(dtype)


OPERATIONS: Final[dict[str, Callable[..., object]]] = {
    "input": _input,
    "positions": _positions_tensor,
    "reshaped": _reshaped,
    "copy_host": _copy_host,
    "leaf": _leaf,
    "drop": _drop,
    "rebind": _rebind,
    "sync": _sync,
    "observe": _observe,
    "observe_all": _observe_all,
    "read_item": _item,
    "text": _text,
    "garbage": _garbage,
    "capture": _capture,
    "run_backward": _backward,
    "gradients": _gradients,
    "grad": _grad,
    "clear_grad": _clear_grad,
    "descend": _descend,
    "data": _data,
    "set_data": _set_data,
    "swap": _swap,
    "quantized_tanh": _tanh,
    "tame": _tame,
    "cast": _cast,
}
"""The machine's own operations, by the name they have in an instruction."""
