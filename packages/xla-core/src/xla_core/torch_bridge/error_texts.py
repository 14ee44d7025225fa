"""Recognises PyTorch's errors that have no class of their own, by their text: here and nowhere else."""

from __future__ import annotations

from typing import Final

# torch 2.13, check_inplace of autograd
_LEAF: Final = "leaf Variable that requires grad"
# torch 2.13, the assertion in autograd's engine for a device that came after its threads
_NO_QUEUE: Final = "device_ready_queues_"
# torch 2.13: gloo, and gRPC, in the words of the C library
_LOST: Final = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
# torch 2.13: kernels of the CPU that look at strides, at values of indices, or lack a dtype
_OF_CPU: Final = (
    "view size is not compatible", "out of bounds for dimension", "not implemented for"
)  # fmt: skip
# torch 2.13: of kernels of the CPU
_NO_HALF: Final = ("not implemented for 'Half'", "not implemented for 'BFloat16'")
# torch 2.13: Tensor.numpy() and numpy's own functions of a tensor on a device
_NO_NUMPY: Final = "type tensor to numpy"
# torch 2.13: Scalar::to of a number that the dtype does not hold
_NOT_HELD: Final = "without overflow"
# torch 2.13: the CPU's kernels of integers
_DIVIDED_BY_ZERO: Final = "ZeroDivisionError"


def is_division_by_zero(error: BaseException | None) -> bool:
    """Whether a kernel of the CPU refuses to divide integers by zero."""
    return str(error) == _DIVIDED_BY_ZERO


def is_overflow(error: BaseException | None) -> bool:
    """Whether a kernel refuses a number that a dtype cannot hold."""
    return str(error).endswith(_NOT_HELD)


def is_write_to_leaf(error: BaseException) -> bool:
    """Whether autograd refuses to write in place to a leaf that requires a gradient."""
    return _LEAF in str(error)


def is_backward_before_device(error: BaseException) -> bool:
    """Whether autograd's threads were started before the device was registered, so that it has none."""
    return _NO_QUEUE in str(error)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because the process at the other end has ended."""
    return any(words in str(error) for words in _LOST)


def is_limit_of_cpu_kernels(error: BaseException) -> bool:
    """Whether a kernel of the CPU refuses what other devices compute."""
    return any(words in str(error) for words in _OF_CPU)


def is_missing_half_kernel(error: BaseException) -> bool:
    """Whether the CPU has a kernel for other dtypes, but none for float16 or bfloat16."""
    return str(error).endswith(_NO_HALF)


def is_numpy_of_device(error: BaseException) -> bool:
    """Whether numpy was asked to read a tensor that is not on the CPU."""
    return isinstance(error, TypeError) and _NO_NUMPY in str(error)
