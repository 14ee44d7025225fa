"""The texts of the errors users meet, one constant each, and the functions that fill them in."""

from __future__ import annotations

from typing import Final

import torch

from xla_core.torch_bridge.operands import Operand

MSG_NOT_AN_XLA_TENSOR: Final = (
    "Input tensor is not an XLA tensor: {type_name}. {operator} was called with tensors on {device} and on "
    "{other}; move them to one device first, for example with .to('{device}')"
)
MSG_OTHER_DEVICE: Final = (
    "Expected all tensors to be on the same device, but found at least two devices, {first} and "
    "{second}, in {operator}. Move one of them with .to()"
)
MSG_SYMBOLIC: Final = (
    "{operator} got the symbolic size {value!r}; xla tensors have static shapes. Use plain ints"
)
MSG_UNKNOWN_ARGUMENT: Final = (
    "{operator} got an argument of type {type_name}, which the xla device cannot record: {value!r}"
)
MSG_OVERLAP: Final = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory "
    "location. Please clone() the tensor before performing the operation."
)


class Refusal(str):
    """A reason for ``ValueNeededError`` that knows whether it was given: the user's program may catch the error."""

    given = False


class ValueNeededError(RuntimeError):
    """Something needs a value, or would run, where that is refused; ``reason`` is the text that refuses it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        if isinstance(reason, Refusal):
            reason.given = True


def not_an_xla_tensor(tensor: torch.Tensor, operator: str, device: torch.device) -> RuntimeError:
    """The error for a CPU tensor among the operands."""
    return RuntimeError(
        MSG_NOT_AN_XLA_TENSOR.format(
            type_name=tensor.type(), operator=operator, device=device, other=tensor.device
        )
    )


def other_device(operator: str, first: torch.device, second: torch.device) -> RuntimeError:
    """The error for operands on two ``xla`` devices."""
    return RuntimeError(MSG_OTHER_DEVICE.format(operator=operator, first=first, second=second))


def symbolic(operator: str, value: Operand) -> RuntimeError:
    """The error for a symbolic size."""
    return RuntimeError(MSG_SYMBOLIC.format(operator=operator, value=value))


def unknown_argument(operator: str, value: Operand) -> TypeError:
    """The error for an argument of a kind that no operator schema has."""
    return TypeError(
        MSG_UNKNOWN_ARGUMENT.format(operator=operator, type_name=type(value).__name__, value=value)
    )
