"""Operations of the machine that are no methods of tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

import torch

from xla_core.extension_api.operators import Operand
from xla_core.testing.program_parts.instructions import Observation, UndefinedProgramError, numbers
from xla_core.testing.program_parts.machine_state import MachineState, has_grad
from xla_core.testing.program_parts.memory import same_memory

_MINUS_ZERO: Final = re.compile(r"-(0\.0*)(?!\d)")


def _input(
    machine: MachineState, seed: str, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return numbers(f"{seed}/{machine.iteration}", shape, dtype).to(machine.device)


def _positions_tensor(machine: MachineState, chosen: Sequence[int]) -> torch.Tensor:
    return torch.tensor(chosen, dtype=torch.int64).to(machine.device)


def _reshaped(
    machine: MachineState, t: torch.Tensor, name: str, copied: bool, *args: Operand
) -> torch.Tensor:
    """What is a view or a copy, depending on the strides; with ``copied`` surely a copy."""
    result = getattr(t, name)(*args)
    if copied:
        return result.clone()
    if machine.device.type == "cpu" and not same_memory(result, t):
        raise UndefinedProgramError
    return result


def _copy_host(
    _machine: MachineState, t: torch.Tensor, seed: str, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return t.copy_(numbers(seed, shape, dtype))


def _leaf(_machine: MachineState, source: torch.Tensor) -> torch.Tensor:
    return source.detach().clone().requires_grad_()


def _drop(machine: MachineState, index: int) -> None:
    machine.slots.pop(index, None)


def _rebind(_machine: MachineState, source: torch.Tensor) -> torch.Tensor:
    return source


def _sync(machine: MachineState) -> None:
    machine.sync()


def _observe(machine: MachineState, t: torch.Tensor, where: str) -> None:
    machine.observe(where, t)


def _observe_all(machine: MachineState) -> None:
    machine.observe_all()


def _item(machine: MachineState, t: torch.Tensor) -> None:
    machine.log.append(Observation("item", torch.tensor(t.sum().item()), ()))


def _text(machine: MachineState, t: torch.Tensor) -> None:
    # the CPU's text lacks the device, which may stand in a line of its own, and breaks lines elsewhere
    text = re.sub(r",\s*device='[^']*'", "", repr(t.detach()))
    # XLA computes x + 0 as x, which keeps the sign of a zero
    machine.log.append(_MINUS_ZERO.sub(r"\1", "".join(text.split())))


def _garbage(_machine: MachineState, t: torch.Tensor) -> None:
    """Leave the tensor in a reference cycle, for the garbage collector to find some day."""
    cycle: list[object] = [t]
    cycle.append(cycle)


def _capture(machine: MachineState, t: torch.Tensor) -> None:
    machine.closures.append(lambda: t)


def _backward(
    _machine: MachineState, outputs: Sequence[torch.Tensor], weight: float, keep: bool
) -> None:
    loss = sum((o * weight).sum() for o in outputs)
    assert isinstance(loss, torch.Tensor)
    loss.backward(retain_graph=keep)


def _gradients(
    _machine: MachineState, output: torch.Tensor, leaves: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    gradients = torch.autograd.grad(
        output.sum(), list(leaves), allow_unused=True, retain_graph=True
    )
    # whether the engine hands out a view is nowhere promised
    return [None if g is None else g.clone() for g in gradients]


def _grad(_machine: MachineState, t: torch.Tensor) -> torch.Tensor | None:
    return t.grad if has_grad(t) else None


def _clear_grad(_machine: MachineState, t: torch.Tensor) -> None:
    t.grad = None


def _descend(_machine: MachineState, t: torch.Tensor, rate: float) -> None:
    if has_grad(t):
        assert t.grad is not None
        t.add_(t.grad, alpha=-rate)


def _data(_machine: MachineState, t: torch.Tensor) -> torch.Tensor:
    return t.data


def _swap(machine: MachineState, a: torch.Tensor, b: torch.Tensor) -> None:
    torch.utils.swap_tensors(a, b)
    for slot, tensor in machine.slots.items():
        if tensor is a or tensor is b:  # its version is the other tensor's now
            machine.versions[slot] = tensor._version


def _set_data(_machine: MachineState, t: torch.Tensor, value: torch.Tensor) -> None:
    t.data = value


def _tanh(_machine: MachineState, t: torch.Tensor) -> torch.Tensor:
    """An inexact function, rounded to the grid of the other values."""
    return torch.round(torch.tanh(t) * 4) / 4


def _tame(_machine: MachineState, t: torch.Tensor) -> torch.Tensor:
    """The tensor with small values, so that the next sums and products are exact again."""
    t = t.clamp(-8, 8)
    return torch.round(t * 4) / 4 if t.dtype in (torch.float32, torch.float64) else t


def _cast(_machine: MachineState, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
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
